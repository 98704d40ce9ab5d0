"""Products of rows with one matrix per group, where rows of one group are adjacent.

The experts of a mixture are such groups. The number of rows of each is known only on the device, so
this code never waits for it: grids and sizes depend only on the total number of rows, which also
lets a CUDA graph record them. Each sum has one order, without atomic additions.

On a GPU bfloat16 rows use `torch.nn.functional.grouped_mm` if it reads the bounds on the device
(Hopper and data-center Blackwell; on other cards it first copies them to the host). All other
products use the Triton kernels below. A CPU computes one group after the other.

Shape letters: S rows, G groups, K inner features, N outer features, M features of a left factor.
"""

# ruff: noqa: ANN001, ANN202 - Triton itself finds the types of a kernel's parameters

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

# Rows, outer and inner features of a tile: 72 KiB of shared memory with three stages in half
# precision, which every card since Ampere has.
_ROWS, _OUTER, _INNER = 64, 128, 64
# Smallest side that a tensor core multiplies.
_SMALLEST = 16
# Compute capabilities whose `grouped_mm` reads the bounds of groups on the device.
_DEVICE_BOUNDS = (9, 10)
# Leading dimensions of its operands must be multiples of this many bytes.
_ALIGNED_BYTES = 16

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _find_tile(  # type: ignore[no-untyped-def, unused-ignore]
        ends, tile, num_groups, groups: tl.constexpr, rows: tl.constexpr
    ):
        """Return a tile's group, first row and end; the group is `num_groups` without rows."""
        index = tl.arange(0, groups)
        is_group = index < num_groups
        # Every program scans all groups: their number is small, and the host does not know the
        # bounds.
        stops = tl.load(ends + index, mask=is_group, other=0)
        starts = tl.load(ends + index - 1, mask=is_group & (index > 0), other=0)
        tiles = tl.where(is_group, (stops - starts + rows - 1) // rows, 0)
        last = tl.cumsum(tiles, 0)
        group = tl.sum(tl.where(is_group & (last <= tile), 1, 0), 0)
        mine = index == group
        before = tl.sum(tl.where(mine, last - tiles, 0), 0)
        start = tl.sum(tl.where(mine, starts, 0), 0) + (tile - before) * rows
        return group, start, tl.sum(tl.where(mine, stops, 0), 0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _rows_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        x, w, out, ends, num_groups, size_k, size_n,
        x_row, w_group, w_k, w_n, out_row,
        groups: tl.constexpr, rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
        adds: tl.constexpr, precision: tl.constexpr,
    ):  # fmt: skip
        group, start, stop = _find_tile(ends, tl.program_id(0), num_groups, groups, rows)
        if group >= num_groups:
            return
        row = start + tl.arange(0, rows)
        column = tl.program_id(1) * outer + tl.arange(0, outer)
        deep = tl.arange(0, inner)
        has_row, has_column = (row < stop)[:, None], (column < size_n)[None, :]
        left = x + row[:, None].to(tl.int64) * x_row + deep[None, :]
        right = w + group.to(tl.int64) * w_group + deep[:, None] * w_k + column[None, :] * w_n
        total = tl.zeros([rows, outer], tl.float32)
        for done in range(0, size_k, inner):
            is_deep = deep < size_k - done
            a = tl.load(left + done, mask=has_row & is_deep[None, :], other=0.0)
            b = tl.load(right + done * w_k, mask=is_deep[:, None] & has_column, other=0.0)
            total = tl.dot(a, b, total, input_precision=precision)
        target = out + row[:, None].to(tl.int64) * out_row + column[None, :]
        if adds:
            total += tl.load(target, mask=has_row & has_column, other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=has_row & has_column)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _outer_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        a, b, out, ends, size_m, size_n, a_row, b_row, scale,
        left: tl.constexpr, right: tl.constexpr, rows: tl.constexpr, precision: tl.constexpr,
    ):  # fmt: skip
        group = tl.program_id(0)
        start = tl.load(ends + group - 1, mask=group > 0, other=0)
        stop = tl.load(ends + group)
        m = tl.program_id(1) * left + tl.arange(0, left)
        n = tl.program_id(2) * right + tl.arange(0, right)
        total = tl.zeros([left, right], tl.float32)
        for first in range(start, stop, rows):
            row = first + tl.arange(0, rows)
            is_row, at = row < stop, row.to(tl.int64)
            x = tl.load(
                a + at[None, :] * a_row + m[:, None],
                mask=(m < size_m)[:, None] & is_row[None, :], other=0.0,
            )  # fmt: skip
            y = tl.load(
                b + at[:, None] * b_row + n[None, :],
                mask=is_row[:, None] & (n < size_n)[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(x, y, total, input_precision=precision)
        place = group.to(tl.int64) * size_m * size_n + m[:, None] * size_n + n[None, :]
        inside = (m < size_m)[:, None] & (n < size_n)[None, :]
        tl.store(out + place, (total * scale).to(out.dtype.element_ty), mask=inside)


def multiply_rows(
    x_SK: Tensor, w_GKN: Tensor, ends_G: Tensor, add_to: Tensor | None = None
) -> Tensor:
    """Return each row times the matrix of its group (S, N).

    Args:
        x_SK: rows, sorted by group.
        w_GKN: matrix of each group, of the rows' type; any strides.
        ends_G: number of rows up to the end of each group, int32. Rows after the last end belong
            to no group, and their results are undefined on a GPU.
        add_to: tensor (S, N) to which the product is added in place, and which is returned.
    """
    if not x_SK.is_cuda:
        return _loop_rows(x_SK, w_GKN, ends_G, add_to)
    if _reads_bounds_on_device(x_SK.device) and _suits_torch(x_SK, w_GKN):
        product_SN = F.grouped_mm(x_SK, w_GKN, offs=ends_G)
        return product_SN if add_to is None else add_to.add_(product_SN)
    return launch_rows(x_SK, w_GKN, ends_G, add_to)


def multiply_outer(
    a_SM: Tensor, b_SN: Tensor, ends_G: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Return scale * a.T @ b over the rows of each group (G, M, N) in type `dtype`.

    Sums use at least float32.
    """
    if a_SM.is_cuda:
        return launch_outer(a_SM, b_SN, ends_G, dtype, scale)
    found_GMN = a_SM.new_zeros((len(ends_G), a_SM.shape[1], b_SN.shape[1]), dtype=dtype)
    for group, (start, stop) in enumerate(_bounds(ends_G)):
        if stop > start:
            a_MS, b_RN = a_SM[start:stop].T.to(dtype), b_SN[start:stop].to(dtype)
            found_GMN[group] = (a_MS @ b_RN).mul_(scale)
    return found_GMN


def _loop_rows(x_SK: Tensor, w_GKN: Tensor, ends_G: Tensor, add_to: Tensor | None) -> Tensor:
    found_SN = x_SK.new_zeros((len(x_SK), w_GKN.shape[2])) if add_to is None else add_to
    for group, (start, stop) in enumerate(_bounds(ends_G)):
        if stop > start:
            found_SN[start:stop].addmm_(x_SK[start:stop], w_GKN[group])
    return found_SN


def _bounds(ends_G: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends_G.tolist()]))


@cache
def _reads_bounds_on_device(device: torch.device) -> bool:
    major, _ = torch.cuda.get_device_capability(device)
    return major in _DEVICE_BOUNDS and hasattr(F, "grouped_mm")


def _suits_torch(x_SK: Tensor, w_GKN: Tensor) -> bool:
    """Return whether torch's own kernel supports these operands."""
    sides = (x_SK.shape[1], w_GKN.shape[2])
    return (
        x_SK.dtype == w_GKN.dtype == torch.bfloat16
        and x_SK.stride(1) == 1
        and 1 in (w_GKN.stride(1), w_GKN.stride(2))
        and not any(side * x_SK.itemsize % _ALIGNED_BYTES for side in sides)
        # Narrow products, like those of adapters, waste most of its tiles.
        and min(sides) >= _OUTER
    )


def launch_rows(
    x_SK: Tensor, w_GKN: Tensor, ends_G: Tensor, add_to: Tensor | None = None
) -> Tensor:
    """Compute `multiply_rows` with the Triton kernel."""
    num_groups, size_k, size_n = w_GKN.shape
    x_SK = x_SK if x_SK.stride(1) == 1 else x_SK.contiguous()
    out_SN = x_SK.new_empty((len(x_SK), size_n)) if add_to is None else add_to
    wide = x_SK.dtype == torch.float32
    rows = max(_SMALLEST, min(_ROWS, triton.next_power_of_2(-(-len(x_SK) // num_groups))))
    outer = max(_SMALLEST, min(_OUTER, triton.next_power_of_2(size_n)))
    inner = max(_SMALLEST, min(_INNER // (2 if wide else 1), triton.next_power_of_2(size_k)))
    # Each group ends in at most one tile that is not full.
    grid = (-(-len(x_SK) // rows) + num_groups, -(-size_n // outer))
    _launch(
        _rows_kernel, grid, x_SK,
        (x_SK, w_GKN, out_SN, ends_G, num_groups, size_k, size_n,
         x_SK.stride(0), *w_GKN.stride(), out_SN.stride(0)),
        groups=triton.next_power_of_2(num_groups), rows=rows, outer=outer, inner=inner,
        adds=add_to is not None,
    )  # fmt: skip
    return out_SN


def launch_outer(
    a_SM: Tensor, b_SN: Tensor, ends_G: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Compute `multiply_outer` with the Triton kernel."""
    a_SM, b_SN = a_SM.contiguous(), b_SN.contiguous()
    size_m, size_n = a_SM.shape[1], b_SN.shape[1]
    out_GMN = a_SM.new_empty((len(ends_G), size_m, size_n), dtype=dtype)
    left = max(_SMALLEST, min(_ROWS, triton.next_power_of_2(size_m)))
    right = max(_SMALLEST, min(_ROWS, triton.next_power_of_2(size_n)))
    grid = (len(ends_G), -(-size_m // left), -(-size_n // right))
    _launch(
        _outer_kernel, grid, a_SM,
        (a_SM, b_SN, out_GMN, ends_G, size_m, size_n, a_SM.stride(0), b_SN.stride(0), scale),
        left=left, right=right, rows=_SMALLEST * 2,
    )  # fmt: skip
    return out_GMN


def _launch(
    kernel: Any, grid: tuple[int, ...], like: Tensor, args: tuple[Any, ...], **sizes: Any
) -> None:
    # TF32 would round float32 factors to 10 bits.
    precision = "ieee" if like.dtype == torch.float32 else "tf32"
    kernel[grid](*args, **sizes, precision=precision)

"""Low-rank products of LoRA adapters: one Triton kernel for all layers that share an input.

An adapter of rank 16 on a layer of 4,096 features does almost no arithmetic: its cost is one pass
over the layer's outputs, or over their gradients. cuBLAS chooses tiles for arithmetic and launches
at least one kernel per layer: 20 to 28 us for queries, keys and values of 2,048 tokens on an H200.
Its memory bandwidth allows 12 us, and these kernels take 13 to 15 us.

Limited to half precision, up to three layers of equal rank (queries, keys, values), and GPUs that
Triton supports.

Shape letters: M tokens, O outputs of one layer, R ranks of all adapters of a set, Q of one.
"""

# ruff: noqa: ANN001, ANN202 - Triton itself finds the types of a kernel's parameters

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agents.trainer.kernels.cross_entropy import is_supported

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

_MAX_LAYERS = 3
# Above this rank the products are bound by arithmetic, where cuBLAS is faster.
_MAX_RANK = 64
# Smallest tile edge that tensor cores multiply.
_MIN_RANK = 16
# Tile of the outputs.
_EXPAND = {"tokens": 32, "size": 256, "num_warps": 4}
# Tiles of the gradient, with few tokens each, so that 2,048 tokens occupy a large card.
_SHRINK = {"tokens": 32, "size": 128, "num_warps": 4}
_GATHER = {"tokens": 64, "size": 64, "num_warps": 4}
# Pipeline stages by rank. More do not fit into the shared memory of consumer cards (100 KiB).
_STAGES = {16: 5, 32: 3, 64: 2}

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _expand_tile(  # type: ignore[no-untyped-def, unused-ignore]
        low, up, out, token, first_output, num_tokens, num_ranks, num_outputs,
        rank: tl.constexpr, padded: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        # Ranks below a tensor core's tile are padded with zeros, which add nothing to the product.
        place = tl.arange(0, padded)
        output = first_output + tl.arange(0, size)
        is_token, is_output = token < num_tokens, output < num_outputs
        a = tl.load(
            low + token.to(tl.int64)[:, None] * num_ranks + place[None, :],
            mask=is_token[:, None] & (place < rank)[None, :],
            other=0.0,
        )
        b = tl.load(
            up + output[None, :] * rank + place[:, None],
            mask=is_output[None, :] & (place < rank)[:, None],
            other=0.0,
        )
        found = tl.dot(a, b).to(out.dtype.element_ty)
        target = out + token.to(tl.int64)[:, None] * num_outputs + output[None, :]
        tl.store(target, found, mask=is_token[:, None] & is_output[None, :])

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _expand_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        low, up0, up1, up2, out0, out1, out2, num_tokens, num_ranks, width0, width1, width2,
        rank: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        # The tiles of all layers form one grid: the program's number selects its layer. Triton
        # cannot index a list of pointers, so the three layers are written out.
        token = tl.program_id(1) * tokens + tl.arange(0, tokens)
        first = tl.program_id(0) * size
        start1 = tl.cdiv(width0, size) * size
        start2 = start1 + tl.cdiv(width1, size) * size
        if first < start1:
            _expand_tile(
                low, up0, out0, token, first, num_tokens, num_ranks, width0, rank, padded, size
            )
        elif first < start2:
            _expand_tile(
                low + rank, up1, out1, token, first - start1, num_tokens, num_ranks, width1,
                rank, padded, size,
            )  # fmt: skip
        else:
            _expand_tile(
                low + 2 * rank, up2, out2, token, first - start2, num_tokens, num_ranks, width2,
                rank, padded, size,
            )  # fmt: skip

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _shrink_tile(  # type: ignore[no-untyped-def, unused-ignore]
        gradient, up, low, token, num_tokens, num_ranks, num_outputs,
        rank: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        place = tl.arange(0, padded)
        is_token, is_rank = token < num_tokens, place < rank
        row = gradient + token.to(tl.int64)[:, None] * num_outputs
        total = tl.zeros((tokens, padded), dtype=tl.float32)
        for start in range(0, num_outputs, size):
            output = start + tl.arange(0, size)
            is_output = output < num_outputs
            a = tl.load(
                row + output[None, :], mask=is_token[:, None] & is_output[None, :], other=0.0
            )
            b = tl.load(
                up + output[:, None] * rank + place[None, :],
                mask=is_output[:, None] & is_rank[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total)
        target = low + token.to(tl.int64)[:, None] * num_ranks + place[None, :]
        tl.store(target, total.to(low.dtype.element_ty), mask=is_token[:, None] & is_rank[None, :])

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _shrink_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        gradient0, gradient1, gradient2, up0, up1, up2, low, num_tokens, num_ranks,
        width0, width1, width2,
        rank: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0) * tokens + tl.arange(0, tokens)
        layer = tl.program_id(1)
        if layer == 0:
            _shrink_tile(
                gradient0, up0, low, token, num_tokens, num_ranks, width0,
                rank, padded, tokens, size,
            )  # fmt: skip
        elif layer == 1:
            _shrink_tile(
                gradient1, up1, low + rank, token, num_tokens, num_ranks, width1,
                rank, padded, tokens, size,
            )  # fmt: skip
        else:
            _shrink_tile(
                gradient2, up2, low + 2 * rank, token, num_tokens, num_ranks, width2,
                rank, padded, tokens, size,
            )  # fmt: skip

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gather_tile(  # type: ignore[no-untyped-def, unused-ignore]
        gradient, low, out, first_output, num_tokens, num_ranks, num_outputs, scale,
        rank: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        place = tl.arange(0, padded)
        output = first_output + tl.arange(0, size)
        is_output, is_rank = output < num_outputs, place < rank
        total = tl.zeros((size, padded), dtype=tl.float32)
        for start in range(0, num_tokens, tokens):
            token = start + tl.arange(0, tokens)
            is_token = token < num_tokens
            row = token.to(tl.int64)[:, None]
            a = tl.load(
                gradient + row * num_outputs + output[None, :],
                mask=is_token[:, None] & is_output[None, :],
                other=0.0,
            )
            b = tl.load(
                low + row * num_ranks + place[None, :],
                mask=is_token[:, None] & is_rank[None, :],
                other=0.0,
            )
            total = tl.dot(tl.trans(a), b, total)
        target = out + output[:, None] * rank + place[None, :]
        found = (total * scale).to(out.dtype.element_ty)
        tl.store(target, found, mask=is_output[:, None] & is_rank[None, :])

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gather_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        gradient0, gradient1, gradient2, low, out0, out1, out2, num_tokens, num_ranks,
        width0, width1, width2, scale,
        rank: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0) * size
        start1 = tl.cdiv(width0, size) * size
        start2 = start1 + tl.cdiv(width1, size) * size
        if first < start1:
            _gather_tile(
                gradient0, low, out0, first, num_tokens, num_ranks, width0, scale,
                rank, padded, tokens, size,
            )  # fmt: skip
        elif first < start2:
            _gather_tile(
                gradient1, low + rank, out1, first - start1, num_tokens, num_ranks, width1, scale,
                rank, padded, tokens, size,
            )  # fmt: skip
        else:
            _gather_tile(
                gradient2, low + 2 * rank, out2, first - start2, num_tokens, num_ranks, width2,
                scale, rank, padded, tokens, size,
            )  # fmt: skip


def supports(low_MR: Tensor, ups: Sequence[Tensor]) -> bool:
    """Return whether the kernels can compute these adapters.

    Args:
        low_MR: outputs of the down projections.
        ups: up projection (O, Q) of each adapter.
    """
    return (
        low_MR.dtype in (torch.bfloat16, torch.float16)
        and len(ups) <= _MAX_LAYERS
        and ups[0].shape[1] <= _MAX_RANK
        and all(up_OQ.shape[1] == ups[0].shape[1] and up_OQ.is_contiguous() for up_OQ in ups)
        and low_MR.is_contiguous()
        and len(low_MR) > 0
        and is_supported(low_MR.device)
        and _works(low_MR.device, low_MR.dtype, ups[0].shape[1])
    )


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, rank: int) -> bool:
    """Return whether the kernels run on this card; few models of cards were tested."""
    try:
        ups = [torch.zeros(rank, rank, dtype=dtype, device=device) for _ in range(2)]
        low_MR = torch.zeros(1, 2 * rank, dtype=dtype, device=device)
        outs = expand(low_MR, ups)
        differentiate_ups(outs, differentiate_low(outs, ups), ups, 1.0, torch.float32)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton and its compilers fail in many ways
        print(f"Adapters are computed by PyTorch's products: {error}", file=sys.stderr)
        return False
    return True


def expand(low_MR: Tensor, ups: Sequence[Tensor]) -> list[Tensor]:
    """Return low @ up.T (M, O) of each adapter, from its columns of `low`."""
    widths = [len(up_OQ) for up_OQ in ups]
    outs = [low_MR.new_empty((len(low_MR), width)) for width in widths]
    num_tiles = sum(triton.cdiv(width, _EXPAND["size"]) for width in widths)
    _expand_kernel[(num_tiles, triton.cdiv(len(low_MR), _EXPAND["tokens"]))](
        low_MR, *_three(ups), *_three(outs), *low_MR.shape, *_three(widths, 0),
        **_rank(ups), **_EXPAND,
    )  # fmt: skip
    return outs


def differentiate_low(gradients: Sequence[Tensor], ups: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the down projections' outputs (M, R).

    Args:
        gradients: gradient (M, O) of each adapter's output.
        ups: up projection (O, Q) of each adapter.
    """
    gradients = [gradient_MO.contiguous() for gradient_MO in gradients]
    num_tokens = len(gradients[0])
    low_MR = gradients[0].new_empty((num_tokens, sum(up_OQ.shape[1] for up_OQ in ups)))
    _shrink_kernel[(triton.cdiv(num_tokens, _SHRINK["tokens"]), len(ups))](
        *_three(gradients), *_three(ups), low_MR, *low_MR.shape, *_three([len(u) for u in ups], 0),
        **_rank(ups), **_stages(ups), **_SHRINK,
    )  # fmt: skip
    return low_MR


def differentiate_ups(
    gradients: Sequence[Tensor], low_MR: Tensor, ups: Sequence[Tensor], scale: float, dtype: Any
) -> list[Tensor]:
    """Return scale * gradient.T @ low (O, Q), the gradient of each up projection.

    Args:
        gradients: gradient (M, O) of each adapter's output.
        low_MR: outputs of the down projections.
        ups: up projections; only their shapes are used.
        scale: factor of the result.
        dtype: type of the result.
    """
    gradients = [gradient_MO.contiguous() for gradient_MO in gradients]
    outs = [torch.empty_like(up_OQ, dtype=dtype) for up_OQ in ups]
    widths = [len(up_OQ) for up_OQ in ups]
    num_tiles = sum(triton.cdiv(width, _GATHER["size"]) for width in widths)
    _gather_kernel[(num_tiles,)](
        *_three(gradients), low_MR, *_three(outs), *low_MR.shape, *_three(widths, 0), scale,
        **_rank(ups), **_stages(ups), **_GATHER,
    )  # fmt: skip
    return outs


def _three(values: Sequence[Any], filling: Any = None) -> list[Any]:
    """Return the values, padded to the kernels' number of layers."""
    filling = values[0] if filling is None else filling
    return [*values, *[filling] * (_MAX_LAYERS - len(values))]


def _rank(ups: Sequence[Tensor]) -> dict[str, int]:
    rank = ups[0].shape[1]
    return {"rank": rank, "padded": max(_MIN_RANK, triton.next_power_of_2(rank))}


def _stages(ups: Sequence[Tensor]) -> dict[str, int]:
    return {"num_stages": _STAGES[_rank(ups)["padded"]]}

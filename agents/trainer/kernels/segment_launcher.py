"""Launch the Triton kernels of attention within segments, with tiles that fit the card.

Shape letters as in `segment_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agents.trainer.kernels import segment_kernels
from agents.trainer.kernels.segment_loop import LOG2E

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    from triton.runtime.errors import OutOfResources  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

WIDEST_HEAD = 512
"""Widest head of the kernels: no tile of a wider one fits into a card's shared memory."""
# Number of bounds that a program compares at once.
_BOUNDS_AT_ONCE = 128


class Tile(NamedTuple):
    """Sizes of one program of a kernel."""

    rows: int
    """Number of tokens that the program owns: queries, or keys in the kernel of their gradients."""
    columns: int
    """Number of tokens per iteration of its loop."""
    num_warps: int
    num_stages: int


# Tiles by head width, those with the most reuse first. The first that fits into a card's shared
# memory is used: 227 KiB on Hopper, 163 on the A100, 99 on consumer cards since Ampere. Larger ones
# spill registers. Never chosen by timing, as two starts of a run must not add in different orders.
_FORWARD = {
    64: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: (Tile(128, 64, 8, 3), Tile(64, 32, 4, 2)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 4, 1)),
    512: (Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
}
_QUERIES = {
    64: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    128: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
    512: (Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}
_KEYS = {
    64: (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    128: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)),
    256: (Tile(32, 64, 8, 1), Tile(32, 32, 8, 1), Tile(32, 16, 4, 1)),
    512: (Tile(16, 16, 8, 1),),
}
# Fitting tiles, by kernel and its compile-time arguments.
_chosen: dict[object, Tile] = {}


def attend(
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    bounds_S: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return attention (M, H, E) and its log-sum-exp (H, M); see `segment_attention.attend`."""
    num_tokens, num_heads, _ = query_MHD.shape
    out_MHE = query_MHD.new_empty((num_tokens, num_heads, value_MKE.shape[2]))
    lse_HM = query_MHD.new_empty((num_heads, num_tokens), dtype=torch.float32)
    strides, fixed = _describe(query_MHD, key_MKD, value_MKE, window, softcap)

    def launch(tile: dict[str, int]) -> None:
        segment_kernels.forward_kernel[(_count_blocks(bounds_S, num_tokens, tile), num_heads)](
            query_MHD, key_MKD, value_MKE, bounds_S if sinks_H is None else sinks_H, bounds_S,
            out_MHE, lse_HM, len(bounds_S) - 1, num_tokens, window, *_factors(scale, softcap),
            *strides, has_sinks=sinks_H is not None, **fixed, **tile,
        )  # fmt: skip

    _launch("forward", _FORWARD, query_MHD, fixed, launch)
    return out_MHE, lse_HM


def differentiate(
    gradient_MHE: Tensor,
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    out_MHE: Tensor,
    lse_HM: Tensor,
    bounds_S: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and delta.

    Delta (H, M) is the product of the output of each token with its gradient.
    """
    num_tokens, num_heads, _ = query_MHD.shape
    num_keys = key_MKD.shape[1]
    gradient_MHE = gradient_MHE.contiguous()
    of_query = query_MHD.new_empty(query_MHD.shape)
    delta_HM = torch.empty_like(lse_HM)
    strides, fixed = _describe(query_MHD, key_MKD, value_MKE, window, softcap)
    numbers = (len(bounds_S) - 1, num_tokens, window, *_factors(scale, softcap), scale)

    def launch_queries(tile: dict[str, int]) -> None:
        segment_kernels.queries_kernel[(_count_blocks(bounds_S, num_tokens, tile), num_heads)](
            gradient_MHE, query_MHD, key_MKD, value_MKE, out_MHE, lse_HM, bounds_S,
            of_query, delta_HM, *numbers, *strides, **fixed, **tile,
        )  # fmt: skip

    _launch("queries", _QUERIES, query_MHD, fixed, launch_queries)
    num_parts = num_heads if _is_small(query_MHD, num_keys) else num_keys
    # Parts are added in fp32.
    kind = {"dtype": torch.float32 if num_parts > num_keys else key_MKD.dtype}
    of_key = key_MKD.new_empty((num_tokens, num_parts, key_MKD.shape[2]), **kind)
    of_value = value_MKE.new_empty((num_tokens, num_parts, value_MKE.shape[2]), **kind)

    def launch_keys(tile: dict[str, int]) -> None:
        segment_kernels.keys_kernel[(_count_blocks(bounds_S, num_tokens, tile), num_parts)](
            gradient_MHE, query_MHD, key_MKD, value_MKE, lse_HM, delta_HM, bounds_S,
            of_key, of_value, *numbers, num_heads, *strides,
            heads=num_heads // num_parts, **fixed, **tile,
        )  # fmt: skip

    _launch("keys", _KEYS, query_MHD, fixed, launch_keys)
    if num_parts > num_keys:
        of_key, of_value = (
            x.unflatten(1, (num_keys, -1)).sum(2).to(key_MKD.dtype) for x in (of_key, of_value)
        )
    return of_query, of_key, of_value, delta_HM


def _is_small(query_MHD: Tensor, num_keys: int) -> bool:
    """Return whether one program per block of keys would leave a part of the card idle."""
    num_tokens, num_heads, _ = query_MHD.shape
    count = torch.cuda.get_device_properties(query_MHD.device).multi_processor_count
    return num_heads > num_keys and num_tokens // 64 * num_keys < 2 * count


def _describe(
    query_MHD: Tensor, key_MKD: Tensor, value_MKE: Tensor, window: int, softcap: float
) -> tuple[list[int], dict[str, Any]]:
    """Return the strides of the inputs, and the compile-time arguments of a kernel."""
    inputs = (query_MHD, key_MKD, value_MKE)
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    width, value_width = query_MHD.shape[2], value_MKE.shape[2]
    fixed = {
        "group": query_MHD.shape[1] // key_MKD.shape[1],
        "has_window": window > 0,
        "has_cap": softcap > 0,
        "width": width,
        "value_width": value_width,
        "padded": max(16, triton.next_power_of_2(width)),
        "value_padded": max(16, triton.next_power_of_2(value_width)),
        "at_once": _BOUNDS_AT_ONCE,
    }
    return strides, fixed


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return the factor inside the cap, and the factor outside of it."""
    return (scale / softcap, softcap * LOG2E) if softcap else (0.0, scale * LOG2E)


def _count_blocks(bounds_S: Tensor, num_tokens: int, tile: dict[str, int]) -> int:
    """Return the number of programs that cover any division of the row; see `segment_kernels`."""
    return num_tokens // tile["rows"] + len(bounds_S) - 1


def _launch(
    name: str,
    tiles: dict[int, tuple[Tile, ...]],
    query_MHD: Tensor,
    fixed: dict[str, Any],
    launch: Callable[[dict[str, int]], None],
) -> None:
    """Launch a kernel with the first tile that fits the card."""
    padded = max(64, fixed["padded"], fixed["value_padded"])
    key = (name, query_MHD.device, query_MHD.dtype, *fixed.values())
    fitting = _chosen.get(key)
    refusal: Exception | None = None
    for tile in [fitting] if fitting is not None else tiles[padded]:
        try:
            launch(tile._asdict())
        except OutOfResources as error:  # raised before anything runs
            refusal = error
            continue
        _chosen[key] = tile
        return
    assert refusal is not None
    raise refusal

"""Attention that stays within each segment of a flat row.

A micro-batch is one row of segments laid end to end, so nothing is padded; this function, put into
Transformers' own registry, is what keeps them apart. No mask is made for it: a class that asks for
one gets None, because Transformers makes masks only for the names that it knows.

On GPUs one call of FlashAttention (Dao 2023, arXiv:2307.08691) takes all segments, or, when they
all have one length, one call of SDPA; both follow sliding windows. Elsewhere, and for what these
cannot do (fp32 and fp64, soft-capped scores, wide heads), each segment gets a call of its own.

Shape letters: H heads, M tokens of the flat row, T of one segment, S segments, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn
from transformers import AttentionInterface

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

NAME = "rackless_segments"
_WIDEST_HEAD = 256
"""FlashAttention knows no wider heads."""
_VARLEN_KNOWS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}
"""torch 2.11 takes a scale and a window, 2.12 fewer heads of keys than of queries, too."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the segments of a flat row begin and end."""

    bounds: tuple[int, ...]
    """First token of each segment, and the number of all tokens (S + 1)."""
    longest: int
    """Tokens of the longest segment, or more."""
    equal: int
    """Length of every segment where all have the same; 0: they do not."""
    bounds_S: Tensor | None
    """The same bounds as int32 on the GPU, for FlashAttention; None on a CPU."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Lay out segments of these lengths."""
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        on_gpu = None
        if device.type == "cuda":
            host = torch.tensor(bounds, dtype=torch.int32).pin_memory()
            on_gpu = host.to(device, non_blocking=True)
        return cls(
            bounds=tuple(bounds),
            longest=max(lengths),
            equal=lengths[0] if len(set(lengths)) == 1 else 0,
            bounds_S=on_gpu,
        )


def register() -> None:
    """Make `attend_segments` known to Transformers."""
    AttentionInterface.register(NAME, attend_segments)


def attend_segments(
    module: nn.Module,
    query_1HMD: Tensor,
    key_1HMD: Tensor,
    value_1HMD: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    windows: list[int | None] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment, as Transformers' attention functions are called.

    Args:
        windows: gets the sliding window that each layer asks for, to check that they do.

    Returns:
        The output (1, M, H, D), and no weights.

    Raises:
        ValueError: the model asks for what this function does not do.
    """
    if attention_mask is not None or dropout or s_aux is not None:
        raise ValueError("masks, dropout of scores and attention sinks are not supported")
    if windows is not None:
        windows.append(sliding_window)
    query, key, value = query_1HMD, key_1HMD, value_1HMD
    window = sliding_window if sliding_window and sliding_window < segments.longest else None
    flash = (
        query.is_cuda
        and softcap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _WIDEST_HEAD
    )
    if flash and segments.equal and window is None:
        return _attend_equal(query, key, value, segments.equal, scaling), None
    if flash and "window_size" in _VARLEN_KNOWS and segments.bounds_S is not None:
        return _attend_flash(query, key, value, segments, scaling, window), None
    parts = []
    for start, stop in pairwise(segments.bounds):
        one = [x[:, :, start:stop] for x in (query, key, value)]
        parts.append(_attend_one(one[0], one[1], one[2], scaling, window, softcap))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend_equal(
    query: Tensor, key: Tensor, value: Tensor, length: int, scaling: float | None
) -> Tensor:
    """Fold the flat row into a batch of its segments, which all have one length."""
    q, k, v = (x[0].unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out_SHTD = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out_SHTD.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    settings: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if window is not None:
        settings["window_size"] = (window - 1, 0)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _VARLEN_KNOWS:
            settings["enable_gqa"] = True
        else:
            key, value = (_repeat_heads(x, query.shape[1]) for x in (key, value))
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds, longest = segments.bounds_S, segments.longest
    return varlen_attn(*flat, bounds, bounds, longest, longest, **settings).unsqueeze(0)


def _repeat_heads(x_1HMD: Tensor, num_heads: int) -> Tensor:
    return x_1HMD.repeat_interleave(num_heads // x_1HMD.shape[1], dim=1)


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend causally over one segment (1, H, T, D)."""
    length = query.shape[2]
    key, value = (_repeat_heads(x, query.shape[1]) for x in (key, value))
    if softcap is None and (window is None or length <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    place_T = torch.arange(length, device=query.device)
    distance_TT = place_T[:, None] - place_T
    allowed_TT = (distance_TT >= 0) & (distance_TT < (window or length))
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed_TT, scale=scaling
        )
    # Gemma 2's order: scale, cap, mask, softmax in fp32 at least (Gemma Team 2024, 2408.00118).
    scores_1HTT = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores_1HTT = torch.tanh(scores_1HTT / softcap) * softcap
    wide = torch.promote_types(query.dtype, torch.float32)
    scores_1HTT = scores_1HTT.to(wide).masked_fill(~allowed_TT, -torch.inf)
    return scores_1HTT.softmax(-1).to(query.dtype) @ value

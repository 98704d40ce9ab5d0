"""Causal attention within each segment of a flat row, for Transformers' attention registry.

A micro-batch is one row of segments laid end to end, so it has no padding; this function keeps the
segments apart. It needs no mask: Transformers builds masks only for the attention names that it
knows, so a model that asks for one gets None.

On GPUs FlashAttention or, for soft-capped scores, sinks and wide heads, `segment_attention`
processes all segments in one call. On CPUs, in fp32 and in fp64 each segment is a separate call;
inside a compiled layer those calls are one operator, since their bounds are data.

A sink is a logit of a head that takes part in each softmax and whose weight is dropped, so that a
query may attend to no token (Xiao et al. 2023, arXiv:2309.17453; gpt-oss learns it).

Shape letters: H heads, M tokens of the flat row, T of one segment, S segments, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from transformers import AttentionInterface

from agents.trainer.kernels import segment_attention, segment_loop
from agents.trainer.kernels.flash_attention import flash_attention

NAME = "rackless_segments"
_NARROW = (torch.bfloat16, torch.float16)
# FlashAttention supports no wider heads.
_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Segments:
    """Bounds of the segments of a flat row, in the forms that its readers need."""

    bounds: tuple[int, ...]
    """First token of each segment, and the total number of tokens (S + 1)."""
    host_bounds_S: Tensor
    """The bounds as int32 in host memory."""
    bounds_S: Tensor
    """The bounds as int32 on the device."""
    host_extent_2: Tensor
    """Upper bound of the segments' lengths, and their common length or 0; int32 in host memory. The
    bound may exceed the longest segment, so that it repeats across micro-batches.
    """

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, longest: int = 0) -> Segments:
        """Lay out segments of these lengths, which may be 0.

        Args:
            lengths: tokens of each segment.
            device: device of the bounds.
            longest: upper bound of the lengths; 0 for the longest segment.

        Raises:
            ValueError: a segment is longer than `longest`.
        """
        most = max(lengths)
        if longest and most > longest:
            raise ValueError(f"a segment of {most} tokens is longer than {longest}")
        common = most if min(lengths) == most else 0
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        host = torch.tensor(bounds, dtype=torch.int32)
        on_device = host
        if device.type == "cuda":
            on_device = host.pin_memory().to(device, non_blocking=True)
        return cls(
            bounds=tuple(bounds),
            host_bounds_S=host,
            bounds_S=on_device,
            host_extent_2=_extent(longest or most, common),
        )

    def split(self, most_tokens: int, place_M: Tensor) -> Segments:
        """Return these segments, each cut from its beginning into pieces of `most_tokens`.

        The bounds on the device follow from `place_M`, the place of each token in its segment, and
        their number from sizes alone, so a recorded pass can serve other rows.
        """
        if int(self.host_extent_2[0]) <= most_tokens:
            return self
        pieces: list[int] = []
        for start, stop in pairwise(self.bounds):
            full, rest = divmod(stop - start, most_tokens)
            pieces += [most_tokens] * full + [rest] * bool(rest)
        pieces_only = Segments.of(pieces, torch.device("cpu"), most_tokens)
        num_tokens = len(place_M)
        token_M = torch.arange(num_tokens, device=place_M.device, dtype=torch.int32)
        starts_M = torch.where(place_M % most_tokens == 0, token_M, num_tokens).sort().values
        most = min(len(self.bounds) + num_tokens // most_tokens, num_tokens)
        bounds_S = F.pad(starts_M[:most], (0, 1), value=num_tokens).int()
        return replace(pieces_only, bounds_S=bounds_S, host_extent_2=_extent(most_tokens))


def _extent(longest: int, common: int = 0) -> Tensor:
    return torch.tensor([longest, common], dtype=torch.int32)


def find_chunk(config: Any) -> int | None:
    """Return the width of chunked attention in tokens, or None if no layer has it (Llama 4)."""
    if "chunked_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    return int(config.attention_chunk_size)


def take_temperatures(model: nn.Module) -> list[Any]:
    """Let `attend_segments` scale queries by their places; return the layers that do so.

    In Llama 4, layers without rotary angles scale by the place in the whole row, which is wrong for
    a flat row.
    """
    tuned = [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
    ]
    for module in tuned:
        module.attn_temperature_tuning = False
        module.tunes_by_place = not module.use_rope
    return tuned


def return_temperatures(tuned: Sequence[Any]) -> None:
    """Undo `take_temperatures`."""
    for module in tuned:
        module.attn_temperature_tuning, module.tunes_by_place = True, False


def register() -> None:
    """Register `attend_segments` with Transformers."""
    AttentionInterface.register(NAME, attend_segments)


def attend_segments(  # noqa: PLR0913 - Transformers calls it with these
    module: nn.Module,
    query_1HMD: Tensor,
    key_1HMD: Tensor,
    value_1HMD: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds_S: Tensor,
    host_bounds_S: Tensor,
    host_extent_2: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    windows: list[int | None] | None = None,
    chunks: Segments | None = None,
    place_M: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment; has the signature of Transformers' attention functions.

    Args:
        softcap: scores become softcap * tanh(score / softcap) before the softmax.
        s_aux: sink of each query head (H,), a logit; None without sinks.
        bounds_S: see `Segments`. A tensor instead of numbers, so that one compiled layer serves
            every micro-batch.
        host_bounds_S: see `Segments`.
        host_extent_2: see `Segments`.
        windows: collects the sliding window that each layer passes, to check that it does.
        chunks: segments cut into chunks, for layers that attend within those.
        place_M: place of each token in its segment, for layers that scale queries by it.

    Returns:
        The output (1, M, H, D), and None instead of weights.

    Raises:
        ValueError: the model needs a feature that this function does not support.
    """
    if attention_mask is not None or dropout:
        raise ValueError("masks and dropout of scores are not supported")
    if windows is not None:
        windows.append(sliding_window)
    if chunks is not None and _is_chunked(module):
        bounds_S, host_bounds_S = chunks.bounds_S, chunks.host_bounds_S
        host_extent_2 = chunks.host_extent_2
    if getattr(module, "tunes_by_place", False):
        query_1HMD = _scale_by_place(module, query_1HMD, place_M)
    query, key, value = query_1HMD, key_1HMD, value_1HMD
    if value.dtype in _NARROW:
        # Rotary embeddings have fp32 angles, so autocast's half-precision queries and keys come out
        # as fp32. The next product would cast them back anyway.
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    is_plain = not softcap and s_aux is None
    is_narrow = query.is_cuda and query.dtype in _NARROW
    if is_plain and not is_narrow and not torch.compiler.is_compiling():
        # PyTorch's kernels never store the scores of a whole segment, but the loop around them
        # cannot be compiled.
        return _attend_each(query, key, value, host_bounds_S, scale, window), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if is_plain and is_narrow and query.shape[-1] == value.shape[-1] <= _WIDEST_HEAD:
        out_MHD = flash_attention(q, k, v, bounds_S, host_extent_2, scale, window)
    else:
        out_MHD = segment_attention.attend(
            q, k, v, bounds_S, host_bounds_S,
            sinks_H=s_aux, scale=scale, window=window, softcap=softcap or 0.0,
        )  # fmt: skip
    return out_MHD.unsqueeze(0), None


def _is_chunked(module: Any) -> bool:
    return bool(module.config.layer_types[module.layer_idx] == "chunked_attention")


def _scale_by_place(module: Any, query_1HMD: Tensor, place_M: Tensor) -> Tensor:
    """Scale queries by their distance from the beginning (Nakanishi 2025, arXiv:2501.19399)."""
    blocks_M = torch.floor((place_M.float() + 1.0) / module.floor_scale)
    scale_M1 = (torch.log1p(blocks_M) * module.attn_scale + 1.0).unsqueeze(-1)
    return (query_1HMD * scale_M1).to(query_1HMD.dtype)


def _attend_each(
    query_1HMD: Tensor,
    key_1HMD: Tensor,
    value_1HMD: Tensor,
    host_bounds_S: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Return attention (1, M, H, D), computed segment by segment."""
    parts = []
    for start, stop in pairwise(segment_loop.read_bounds(host_bounds_S, query_1HMD.device)):
        length = stop - start
        if not length:
            continue
        query, key, value = (x[:, :, start:stop] for x in (query_1HMD, key_1HMD, value_1HMD))
        key, value = (_repeat_heads(x, query.shape[1]) for x in (key, value))
        allowed_TT = None
        if 0 < window < length:
            place_T = torch.arange(length, device=query.device)
            distance_TT = place_T[:, None] - place_T
            allowed_TT = (distance_TT >= 0) & (distance_TT < window)
        parts.append(
            F.scaled_dot_product_attention(
                query, key, value, attn_mask=allowed_TT, is_causal=allowed_TT is None, scale=scale
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def _repeat_heads(x_1HMD: Tensor, num_heads: int) -> Tensor:
    return x_1HMD.repeat_interleave(num_heads // x_1HMD.shape[1], dim=1)

"""Lay examples out as micro-batches; `contract.micro_shapes` divides them.

A micro-batch is one flat row: segments end to end, with positions restarting at 0 in each, so it
needs no padding even for rows of very different lengths. On GPUs the end of the row is padded to a
size that suits matrix products, or to a fixed shape that repeats; see `execution.shapes`. Padding
consists of separate segments. The split of a slice changes results only in the last digits, because
gradients are sums over tokens.

Shape letters: M tokens of the flat row, N targets (tokens whose prediction counts), S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agents.shared.micro_shapes import round_up_tokens
from agents.trainer.data.examples import Example
from agents.trainer.model.attention import Segments

CPU_TOKENS = 4096
"""Micro-batch size on CPUs, in tokens; larger ones are not faster."""
NO_LABEL = -1
"""Label of a target that is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroShape:
    """All sizes of a micro-batch that a recording fixes."""

    num_tokens: int
    """Number of tokens of the flat row."""
    num_segments: int
    """Number of segments, including padding; the last ones may be empty."""
    num_targets: int
    longest: int
    """Upper bound of a segment's length, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One flat row that passes through the model at once."""

    ids_1M: Tensor
    """Token ids, int64."""
    position_1M: Tensor
    """Position of each token in its segment."""
    segments: Segments
    """Segments of the examples in order, followed by the padding."""
    lengths: tuple[int, ...]
    """Number of tokens of each example."""
    predicted_at_N: Tensor
    """Index in the flat row that predicts each target: that of the token before it."""
    label_N: Tensor
    """Token id of each target; `NO_LABEL` for padding, which has no loss."""
    segment_N: Tensor
    """Index of each target's segment."""
    num_segments: int
    """Number of segments: those of the examples, or all of a fixed shape."""
    weight_N: Tensor | None = None
    """Weight of each target, float32; None: 1."""
    is_real_S: Tensor | None = None
    """1 for a segment of an example, 0 for padding, float32; None without padding."""

    @property
    def num_tokens(self) -> int:
        return self.segments.bounds[-1]


def build_micro_batch(
    examples: Sequence[Example], device: torch.device, shape: MicroShape | None = None
) -> MicroBatch:
    """Lay examples out as one flat row on the device.

    Args:
        examples: at least one example.
        device: device of the tensors.
        shape: shape to pad to; None for the smallest one that suits the device.
    """
    segments = [segment for example in examples for segment in example.segments]
    lengths = [len(segment.ids) for segment in segments]
    num_tokens = sum(lengths)
    whole = _pad_segments(lengths, device, shape)
    # Not a pad token: its embedding may be all 0, and norms without an epsilon divide by its
    # length.
    ids_M = np.full(sum(whole), segments[-1].ids[-1], dtype=np.int64)
    np.concatenate([segment.ids for segment in segments], out=ids_M[:num_tokens])
    is_target_M = np.concatenate([segment.is_target for segment in segments])
    place_N = np.flatnonzero(is_target_M)
    label_N = ids_M[place_N]
    segment_N = np.repeat(np.arange(len(lengths)), lengths)[place_N]
    position_M = np.concatenate([np.arange(length, dtype=np.int64) for length in whole])
    weight_N = None
    if any(segment.weights is not None for segment in segments):
        weight_N = np.concatenate(
            [
                np.ones(len(one.ids), dtype=np.float32) if one.weights is None else one.weights
                for one in segments
            ]
        )[place_N]
    is_real_S = None
    if shape is not None:
        # Padded targets are predicted at token 0, and their label gives no loss.
        more = (0, shape.num_targets - len(place_N))
        place_N = np.pad(place_N, more, constant_values=1)
        label_N = np.pad(label_N, more, constant_values=NO_LABEL)
        segment_N = np.pad(segment_N, more)
        weight_N = None if weight_N is None else np.pad(weight_N, more)
        is_real_S = (np.arange(len(whole)) < len(lengths)).astype(np.float32)
    return MicroBatch(
        ids_1M=copy_to_device(ids_M[None], device),
        position_1M=copy_to_device(position_M[None], device),
        segments=Segments.of(whole, device, shape.longest if shape else 0),
        lengths=tuple(example.num_tokens for example in examples),
        predicted_at_N=copy_to_device(place_N - 1, device),
        label_N=copy_to_device(label_N, device),
        segment_N=copy_to_device(segment_N, device),
        num_segments=len(lengths) if shape is None else len(whole),
        weight_N=None if weight_N is None else copy_to_device(weight_N, device),
        is_real_S=None if is_real_S is None else copy_to_device(is_real_S, device),
    )


def _pad_segments(lengths: list[int], device: torch.device, shape: MicroShape | None) -> list[int]:
    """Return the lengths of all segments; no token that counts attends to padding."""
    num_tokens = sum(lengths)
    if shape is None:
        size = round_up_tokens(num_tokens) if device.type == "cuda" else num_tokens
        return [*lengths, size - num_tokens] if size > num_tokens else lengths
    left = shape.num_tokens - num_tokens
    num_full, rest = divmod(left, shape.longest)
    pads = [shape.longest] * num_full + ([rest] if rest else [])
    # Empty segments complete the number that the recording fixes.
    num_empty = shape.num_segments - len(lengths) - len(pads)
    return [*lengths, *pads, *[0] * num_empty]


def copy_to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the copy."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    # Pinned: a copy from pageable memory would block the host.
    return host.pin_memory().to(device, non_blocking=True)

"""Lay examples out as micro-batches; `contract.micro_shapes` divides them.

A micro-batch is one flat row: segments end to end, with positions restarting at 0 in each, so that
no padding is needed however unequal the rows are. On GPUs the end of the row is padded to a size
that suits matrix products; the padding is a segment of its own. How a slice is split changes
results only in the last digits, because gradients are sums over tokens.

Shape letters: M tokens of the flat row, N targets (tokens whose prediction counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agents.contract.micro_shapes import round_up_tokens
from agents.trainer.data.examples import Example
from agents.trainer.model.attention import Segments

CPU_TOKENS = 4096
"""Micro-batch size on CPUs, in tokens; larger ones are no faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One flat row that goes through the model at once."""

    ids_1M: Tensor
    """Token ids, int64."""
    position_1M: Tensor
    """Position of each token in its segment."""
    segments: Segments
    """Segments of the examples in order, followed by the padding."""
    lengths: tuple[int, ...]
    """Number of tokens of each example."""
    predicted_at_N: Tensor
    """Index in the flat row at which each target is predicted: that of the token before it."""
    label_N: Tensor
    """Token id of each target."""
    segment_N: Tensor
    """Index of each target's segment."""
    num_segments: int
    """Number of segments without the padding."""

    @property
    def num_tokens(self) -> int:
        return self.segments.bounds[-1]


def build_micro_batch(examples: Sequence[Example], device: torch.device) -> MicroBatch:
    """Lay examples out as one flat row on the device."""
    segments = [segment for example in examples for segment in example.segments]
    lengths = [len(segment.ids) for segment in segments]
    num_tokens = sum(lengths)
    padding = round_up_tokens(num_tokens) - num_tokens if device.type == "cuda" else 0
    # A pad token's embedding may be all 0, and norms without an epsilon divide by its length.
    ids_M = np.full(num_tokens + padding, segments[-1].ids[-1], dtype=np.int64)
    np.concatenate([segment.ids for segment in segments], out=ids_M[:num_tokens])
    is_target_M = np.concatenate([segment.is_target for segment in segments])
    place_N = np.flatnonzero(is_target_M)
    # As a segment of its own the padding is not attended to by any token that counts.
    whole = [*lengths, padding] if padding else lengths
    position_M = np.concatenate([np.arange(length, dtype=np.int64) for length in whole])
    return MicroBatch(
        ids_1M=copy_to_device(ids_M[None], device),
        position_1M=copy_to_device(position_M[None], device),
        segments=Segments.of(whole, device),
        lengths=tuple(example.num_tokens for example in examples),
        predicted_at_N=copy_to_device(place_N - 1, device),
        label_N=copy_to_device(ids_M[place_N], device),
        segment_N=copy_to_device(np.repeat(np.arange(len(lengths)), lengths)[place_N], device),
        num_segments=len(lengths),
    )


def copy_to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the copy."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)

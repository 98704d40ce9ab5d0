"""Choose for each layer in limited memory whether to keep, move or recompute its activations.

The trainer passes measured needs and the planner forecast ones, so that a plan predicts the choice
of the training. Keep everything if it fits; else move as much as the bus can carry during a forward
pass; else recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

from agents.contract.spec import Recompute

MOST_TOKENS = 16384
"""Maximum number of tokens at once, even if more would fit."""
MEMORY_SHARE = 0.95
"""Share of the available GPU memory to plan with; fragmentation takes the rest."""
SHARE_SLACK = 2
"""Maximum share of a rank in a batch, as a multiple of an equal share."""
HOST_SHARE = 0.35
"""Maximum share of a PC's free memory that offloaded activations of all its ranks may take."""
STREAMED_SHARE = 0.6
"""Maximum share of a PC's free memory that streamed weights of all its ranks may take."""
STAGE_CHUNK_BYTES = 1 << 27
"""Unit of pinned memory for offloaded activations of a pipeline's micro-batch, in bytes; larger
tensors stay on the GPU."""
LEAST_GAIN = 0.02
"""Minimum gain in speed that justifies twice the tokens, as a share."""

# Share of the measured bandwidth that copies reach while the GPU computes.
_BUS_SHARE = 0.85

# If at most one layer in this many moves among recomputing ones, the copies of one layer have ended
# before those of the next begin.
_SPARSE = 3

# Number of inputs by which a sparse plan fetches less ahead;
# see agents/trainer/execution/activation_offload.py.
_INPUTS_SPARED = 3

Mode = Literal["keep", "move", "recompute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Number of layers per mode; the remaining layers keep."""

    num_recomputed: int = 0
    num_moved: int = 0

    def is_sparse(self, num_layers: int) -> bool:
        """Return whether few layers move among recomputing ones."""
        return self.num_recomputed > 0 and 0 < _SPARSE * self.num_moved <= num_layers

    def count_in_flight(self, num_layers: int) -> int:
        """Return how many layers' activations are on the GPU while they are copied out and back."""
        return min(self.num_moved, 1 if self.is_sparse(num_layers) else 2)

    def modes(self, num_layers: int) -> list[Mode]:
        """Return the mode of each layer, in order.

        Moving layers are spread evenly, so that each has the time of several others for its
        copy: the last one's activations are out when the forward pass ends, and back in time.

        >>> LayerPlan(num_recomputed=2, num_moved=1).modes(5)
        ['move', 'recompute', 'recompute', 'keep', 'keep']
        """
        num_recomputed = min(self.num_recomputed, num_layers)
        num_moved = min(self.num_moved, num_layers - num_recomputed)
        moved = {i * num_layers // num_moved for i in range(num_moved)}
        others: Iterator[Mode] = chain(repeat("recompute", num_recomputed), repeat("keep"))
        return ["move" if place in moved else next(others) for place in range(num_layers)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Needs of passes over `tokens` tokens at once, measured or forecast."""

    tokens: int
    fixed_bytes: float
    """Memory beyond that at rest, independent of the number of tokens, in bytes."""
    token_bytes: float
    """Memory per token if every layer recomputes, in bytes."""
    layer_bytes: float
    """Memory per token that a layer keeps unless it recomputes, in bytes."""
    input_bytes: float
    """Memory per token that a layer keeps if it recomputes, in bytes."""
    pass_s: float
    """Duration of forward and backward over `tokens` tokens if every layer recomputes, in
    seconds."""
    bus_bytes_per_s: float
    """Bandwidth to host memory; 0: moving is not possible."""


def choose_plan(
    needs: Needs,
    *,
    tokens: int,
    num_layers: int,
    room_bytes: float,
    host_bytes: int,
    recompute: Recompute = "auto",
    may_move: bool = True,
) -> LayerPlan | None:
    """Return the modes for `tokens` tokens at once, or None if they do not fit.

    Args:
        needs: needs of the passes.
        tokens: number of tokens at once.
        num_layers: number of layers of the model.
        room_bytes: GPU memory beyond that at rest.
        host_bytes: host memory for moved activations.
        recompute: whether layers may, must not or must recompute.
        may_move: whether layers may move if they may also recompute.

    With 10 MB a layer, 35 MB left after the fixed needs, and no bus:

    >>> needs = Needs(tokens=1, fixed_bytes=0, token_bytes=1e3, layer_bytes=1e4, input_bytes=1e3,
    ...               pass_s=0, bus_bytes_per_s=0)
    >>> choose_plan(needs, tokens=1000, num_layers=8, room_bytes=36e6, host_bytes=0)
    LayerPlan(num_recomputed=5, num_moved=0)
    """
    layer_bytes = max(1.0, needs.layer_bytes * tokens)
    left = room_bytes - needs.fixed_bytes - needs.token_bytes * tokens
    if left < 0:
        return None
    if recompute == "all":
        return LayerPlan(num_recomputed=num_layers)
    if left >= num_layers * layer_bytes:
        return LayerPlan()
    num_moved = min(int(host_bytes / layer_bytes), num_layers)
    if recompute == "auto":
        num_moved = min(num_moved, _fit_bus(needs, num_layers) if may_move else 0)
    plan = _divide(num_layers, num_moved, left / layer_bytes, 2)
    if plan.num_recomputed and recompute == "none":
        return None
    if plan.num_recomputed:
        # A sparse plan fetches fewer inputs ahead, which frees this much.
        left += _INPUTS_SPARED * needs.input_bytes * tokens
        sparse = _divide(num_layers, min(num_moved, num_layers // _SPARSE), left / layer_bytes, 1)
        if sparse.is_sparse(num_layers) and sparse.num_recomputed <= plan.num_recomputed:
            return sparse
    return plan


def _divide(num_layers: int, num_moved: int, room: float, in_flight: int) -> LayerPlan:
    """Divide layers into kept, moved and recomputed ones, given room for `room` layers."""
    in_flight = min(in_flight, num_moved)
    if room < in_flight:
        # Moving needs room for the layers in flight; without it all others recompute.
        num_moved = in_flight = 0
    num_kept = min(int(room) - in_flight, num_layers - in_flight)
    num_moved = min(num_moved, num_layers - num_kept)
    return LayerPlan(num_recomputed=num_layers - num_kept - num_moved, num_moved=num_moved)


def _fit_bus(needs: Needs, num_layers: int) -> int:
    """Return how many layers can move during a forward pass, while the others' inputs move, too."""
    forward_s = needs.pass_s / 3  # two of the six products of a recomputing layer
    bytes_per_token = forward_s / needs.tokens * needs.bus_bytes_per_s * _BUS_SHARE
    more_bytes = needs.layer_bytes - needs.input_bytes
    left_bytes = bytes_per_token - num_layers * needs.input_bytes
    return max(0, int(left_bytes / more_bytes)) if more_bytes > 0 else 0

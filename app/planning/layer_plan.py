"""What the trainer lets each layer do under a bound on memory: keep, move or recompute.

The same rules as `agents/trainer/tuning.py` follows with what it measures there; a test holds the
two together. Keep everything where it fits; else move as much as the bus takes in the time of a
forward pass; else recompute.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.spec import Recompute

_BUS_SHARE = 0.85
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """How many layers do what; the rest keep."""

    num_recomputed: int = 0
    num_moved: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What passes need."""

    fixed_bytes: float
    """Beside what is there at rest, whatever the number of tokens."""
    token_bytes: float
    """With every layer recomputing, for each token."""
    layer_bytes: float
    """That one layer keeps which does not recompute, for each token."""
    input_bytes: float
    """That one layer keeps which does, for each token."""
    token_s: float
    """Forward and backward of a token with every layer recomputing."""
    bus_bytes_per_s: float
    """To host memory; 0: nothing can be moved."""


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
    """Return what the layers should do with `tokens` tokens at once; None: it does not fit.

    With 10 MB a layer, room for 35 MB beside what is always needed and no bus:

    >>> needs = Needs(fixed_bytes=0, token_bytes=1e3, layer_bytes=1e4, input_bytes=1e3, token_s=0,
    ...               bus_bytes_per_s=0)
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
    in_flight = min(_IN_FLIGHT, num_moved)
    if left < in_flight * layer_bytes:
        num_moved = in_flight = 0
    num_kept = min(int(left / layer_bytes) - in_flight, num_layers - in_flight)
    num_moved = min(num_moved, num_layers - num_kept)
    num_recomputed = num_layers - num_kept - num_moved
    if num_recomputed and recompute == "none":
        return None
    return LayerPlan(num_recomputed=num_recomputed, num_moved=num_moved)


def _fit_bus(needs: Needs, num_layers: int) -> int:
    """Return how many layers can move in the time of a forward pass, beside the others' inputs."""
    bytes_per_token = needs.token_s / 3 * needs.bus_bytes_per_s * _BUS_SHARE
    more_bytes = needs.layer_bytes - needs.input_bytes
    left_bytes = bytes_per_token - num_layers * needs.input_bytes
    return max(0, int(left_bytes / more_bytes)) if more_bytes > 0 else 0

"""In which order a stage takes its forward and backward passes.

One forward, one backward (Narayanan et al. 2019, arXiv:1806.03377) with a deeper start: a stage
begins with so many forward passes more than the next one that features and gradients can travel
while it computes. A start of one more, as usual, leaves a stage waiting for each message there and
back: with 1 Gb/s between four stages it computes 44 % of the time, with two more 81 %. What it
costs is memory: activations of more micro-batches are held at once.

The order is fixed, and gradients are added in the order of the micro-batches whatever it is, so
that the numbers do not depend on when a message arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Action = tuple[Literal["forward", "backward"], int]
"""A pass, and the number of its micro-batch."""


def plan_in_flight(depth: int, planned: Sequence[int | None]) -> tuple[int, ...]:
    """Return how many micro-batches each stage holds at once, at most.

    A stage never holds more than the one before it, which would wait for its gradient in vain.

    Args:
        depth: forward passes by which a stage begins earlier than the next one; 1 without a wire.
        planned: micro-batches that a plan has for each stage, in order; None: it has none.

    >>> plan_in_flight(2, [None] * 4), plan_in_flight(2, [None, 3, None, None])
    ((7, 5, 3, 1), (7, 3, 3, 1))
    """
    found: list[int] = []
    for place, known in enumerate(planned):
        most = 1 + depth * (len(planned) - 1 - place) if known is None else max(1, known)
        found.append(min(most, *found[-1:]) if found else most)
    return tuple(found)


def plan_order(num_micro: int, in_flight: int) -> list[Action]:
    """Return the passes of a stage.

    Args:
        num_micro: number of micro-batches.
        in_flight: micro-batches that it holds at once; see `plan_in_flight`.

    >>> [f"{kind[0]}{number}" for kind, number in plan_order(4, 2)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'f3', 'b2', 'b3']
    """
    first = min(in_flight, num_micro)
    actions: list[Action] = [("forward", number) for number in range(first)]
    for number in range(num_micro):
        actions.append(("backward", number))
        if first + number < num_micro:
            actions.append(("forward", first + number))
    return actions

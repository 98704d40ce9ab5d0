"""Order of the forward and backward passes of a stage.

One forward, one backward (Narayanan et al. 2019, arXiv:1806.03377) with a deeper start: each stage
starts with enough extra forward passes that features and gradients travel while it computes. With
the usual single extra pass a stage waits for each round trip: four stages over 1 Gb/s compute 44 %
of the time, and 81 % with two more passes. The cost is memory, since activations of more
micro-batches are held at once.

The order is fixed and gradients are always added in the order of the micro-batches, so the numbers
do not depend on the arrival time of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Action = tuple[Literal["forward", "backward"], int]
"""A pass, and the number of its micro-batch."""


def plan_in_flight(depth: int, planned: Sequence[int | None]) -> tuple[int, ...]:
    """Return the maximum number of micro-batches that each stage holds at once.

    A stage never holds more than the stage before it, which would wait for its gradient in vain.

    Args:
        depth: forward passes by which a stage starts before the next one; 1 without a network.
        planned: planned number of micro-batches of each stage, in order; None if not planned.

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
        in_flight: number of micro-batches held at once; see `plan_in_flight`.

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

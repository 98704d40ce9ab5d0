"""Split layers over the stages of a pipeline, and compute the duration of a step.

One forward, one backward (1F1B, Narayanan et al. 2019, arXiv:1806.03377): the k-th stage from the
end has at most k micro-batches in flight. So a micro-batch that leaves a stage has to return within
k periods, and a slow link makes the period longer even if every transfer is asynchronous: with
equal stages of t seconds and x seconds per transfer, it is t + 2 x (k-1)/k. More micro-batches in
flight hide the link if the stages' memory can hold them, but not if a transfer takes longer than
the computation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTime:
    """Parts of a step's duration, in seconds."""

    compute_s: float
    """All micro-batches on the slowest stage, in seconds."""
    bubble_s: float
    """Filling and draining the pipeline without transfers, in seconds."""
    network_s: float
    """Additional time due to transfers, in seconds."""

    @property
    def total_s(self) -> float:
        """Duration of the whole step, in seconds."""
        return self.compute_s + self.bubble_s + self.network_s


def time_pipeline(
    stages_s: Sequence[float],
    transfers_s: Sequence[float],
    num_micro: int,
    in_flight: Sequence[int] | None = None,
) -> PipelineTime:
    """Return the time of a step, split into its parts.

    Args:
        stages_s: seconds of both passes of one micro-batch on each stage.
        transfers_s: seconds from each stage to the next, one way; one fewer than stages.
        num_micro: number of micro-batches in a step.
        in_flight: maximum number of micro-batches in flight in each stage; None: as in 1F1B.

    Seven equal stages of 1 s and 16 micro-batches: 27 % of the time is bubble, (S-1)/(m+S-1).
    With 0.1 s per transfer the period is 1 + 2 x 0.1 x 6/7.

    >>> time = time_pipeline([1.0] * 7, [0.0] * 6, 16)
    >>> time.total_s, round(time.bubble_s / time.total_s, 3)
    (22.0, 0.273)
    >>> round(time_pipeline([1.0] * 7, [0.1] * 6, 16).total_s, 2)
    25.77

    One or two more micro-batches in flight hide the transfers except while filling and draining.

    >>> depths = choose_depths([1.0] * 7, [0.1] * 6, 16)
    >>> depths, round(time_pipeline([1.0] * 7, [0.1] * 6, 16, depths).total_s, 2)
    ((9, 7, 6, 5, 4, 3, 1), 23.2)
    """
    free = max(stages_s)
    fill = sum(stages_s)
    num = len(stages_s)
    depths = in_flight or [num - place for place in range(num)]
    returns_s = _list_returns(stages_s, transfers_s)
    period = max(free, *(one / depth for one, depth in zip(returns_s, depths, strict=True)))
    # A stage sends features forward and gradients back through one interface.
    period = max(period, *(sum(pair) for pair in pairwise((0.0, *transfers_s, 0.0))))
    total = fill + 2 * sum(transfers_s) + (num_micro - 1) * period
    bare = fill + (num_micro - 1) * free
    # max(): rounding must not make a part negative.
    return PipelineTime(
        compute_s=num_micro * free,
        bubble_s=max(0.0, bare - num_micro * free),
        network_s=max(0.0, total - bare),
    )


def choose_depths(
    stages_s: Sequence[float], transfers_s: Sequence[float], num_micro: int
) -> tuple[int, ...]:
    """Return the number of micro-batches in flight with which no transfer delays a stage.

    At least as many as in 1F1B, at most those of a step. For the arguments see `time_pipeline`.
    """
    period, num = max(stages_s), len(stages_s)
    return tuple(
        # 1e-9: a rounding error must not cost one more micro-batch.
        max(1, min(num_micro, max(num - place, math.ceil(returned_s / period - 1e-9))))
        for place, returned_s in enumerate(_list_returns(stages_s, transfers_s))
    )


def _list_returns(stages_s: Sequence[float], transfers_s: Sequence[float]) -> list[float]:
    """Return the seconds from a micro-batch's arrival at each stage to the end of its return."""
    found: list[float] = []
    behind_s = behind_x = 0.0
    for place in range(len(stages_s) - 1, -1, -1):
        behind_s += stages_s[place]
        # Twice: features go forward, gradients come back.
        found.append(behind_s + 2 * behind_x)
        behind_x += transfers_s[place - 1] if place else 0.0
    return found[::-1]


def split_layers(
    num_layers: int, seconds: Sequence[float], most: Sequence[int], ends_s: tuple[float, float]
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage that makes the slowest stage as fast as possible.

    Stages keep their order and have at least one layer. A binary search finds the smallest bound
    under which greedy filling succeeds, which is exact for a chain of equal layers.

    Args:
        num_layers: total number of layers.
        seconds: seconds of one layer on each stage.
        most: maximum number of layers that fit each stage.
        ends_s: seconds that the embedding adds to the first stage, and the head to the last.

    >>> split_layers(80, [1.0] * 7, [14] * 7, (0.0, 0.0))
    (12, 12, 12, 11, 11, 11, 11)
    >>> split_layers(12, [1.0, 2.0], [12, 12], (0.0, 0.0))
    (8, 4)
    >>> split_layers(12, [1.0, 2.0], [6, 5], (0.0, 0.0))  # 12 do not fit
    """
    num = len(seconds)
    if num > num_layers or sum(most) < num_layers or min(most) < 1:
        return None
    extra = [0.0] * num
    extra[0] += ends_s[0]
    extra[-1] += ends_s[1]
    # The best bound is the time of one stage with a whole number of layers, so these are all.
    bounds = sorted(
        {
            extra[i] + k * seconds[i]
            for i in range(num)
            for k in range(1, min(most[i], num_layers) + 1)
        }
    )
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(_room(bounds[middle], seconds, most, extra)) >= num_layers and min(
            _room(bounds[middle], seconds, most, extra)
        ):
            high = middle
        else:
            low = middle + 1
    room = _room(bounds[low], seconds, most, extra)
    return _even_out(num_layers, room)


def _room(
    bound: float, seconds: Sequence[float], most: Sequence[int], extra: Sequence[float]
) -> list[int]:
    """Return the number of layers that each stage can compute within `bound` seconds."""
    return [
        # 1e-9: a rounding error must not cost the stage that sets the bound a layer.
        max(0, min(most[i], int((bound - extra[i]) / seconds[i] + 1e-9)))
        for i in range(len(seconds))
    ]


def _even_out(num_layers: int, room: list[int]) -> tuple[int, ...] | None:
    """Remove surplus layers one by one, always from the stage that is relatively fullest."""
    if min(room) < 1 or sum(room) < num_layers:
        return None
    counts, part = list(room), num_layers / sum(room)
    for _ in range(sum(room) - num_layers):
        able = [place for place, count in enumerate(counts) if count > 1]
        counts[max(able, key=lambda i: (counts[i] - room[i] * part, i))] -= 1
    return tuple(counts)


def bounds_of(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the first layer of each stage and the one after its last.

    >>> bounds_of((3, 2))
    ((0, 3), (3, 5))
    """
    ends = list(accumulate(counts))
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))

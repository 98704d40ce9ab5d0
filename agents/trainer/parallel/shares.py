"""Division of a batch over the ranks: contiguous slices whose tokens follow the shares.

A share is a weight; only its ratio to the others counts. Work is measured in tokens and cut between
sequences, so a slice misses its budget by at most half a sequence, and a rank with a small share
may get an empty slice. The cut changes the time, not the gradient (see `loop`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

# Decimals of a measured share; further ones are noise.
_DIGITS = 3


def split_batch(num_tokens: Sequence[int], shares: Sequence[float]) -> list[range]:
    """Cut the batch into one slice per rank; together they are the batch, in order.

    Args:
        num_tokens: tokens of each sequence of the batch.
        shares: weight of each rank, above 0.

    >>> split_batch([10, 10, 10, 10, 10, 10], [1, 2, 3])
    [range(0, 1), range(1, 3), range(3, 6)]
    """
    ends = [0, *accumulate(num_tokens)]
    scale = ends[-1] / sum(shares)
    cuts = [0]
    for weight in list(accumulate(shares))[:-1]:
        # A long sequence may exceed the budgets of several ranks: cuts never move back.
        cuts.append(max(cuts[-1], _nearest(ends, weight * scale)))
    cuts.append(len(num_tokens))
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _nearest(ends: Sequence[int], tokens: float) -> int:
    place = bisect_left(ends, tokens)
    if place >= len(ends):
        return len(ends) - 1
    if place and tokens - ends[place - 1] <= ends[place] - tokens:
        return place - 1
    return place


def shares_from_speeds(tokens_per_s: Sequence[float]) -> tuple[float, ...]:
    """Return the shares with which all ranks finish at the same time.

    >>> shares_from_speeds([100.0, 50.0, 50.0])
    (0.5, 0.25, 0.25)
    """
    # Never 0: a rank without work would never be timed again and would never get any.
    total = sum(tokens_per_s)
    return tuple(max(round(speed / total, _DIGITS), 10**-_DIGITS) for speed in tokens_per_s)

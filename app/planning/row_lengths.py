"""Lengths of a run's rows, and the trainer's division of a typical batch into micro-batches.

Micro-batches of one size are replayed, which hides the host's launch time, but rows of different
lengths have to be padded for that. So the cost of a step depends on the lengths and not on their
mean alone. The division is the trainer's own (`agents.shared.micro_shapes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from agents.shared.micro_shapes import find_size, group_examples, round_up_tokens

# Maximum number of rows that are divided one by one; larger batches repeat that pattern.
_MAX_ROWS = 256
# Width of the log-normal distribution assumed if only mean and maximum are known, typical of chats
# and instructions. Rows whose mean exceeds this share of the maximum count as equally long.
_SIGMA, _EQUAL_SHARE = 0.8, 0.95
_NUM_ASSUMED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """Lengths of rows after the run's truncation and packing."""

    mean_tokens: float
    lengths: tuple[int, ...] = ()
    """Lengths of typical rows, in ascending order; empty: all have the mean length."""

    def draw(self, num_rows: int) -> list[int]:
        """Return the lengths of a typical batch: evenly spaced quantiles.

        >>> RowLengths(mean_tokens=20, lengths=(10, 20, 30)).draw(6)
        [10, 10, 20, 20, 30, 30]
        """
        known = self.lengths
        if not known:
            return [max(1, round(self.mean_tokens))] * num_rows
        return [known[int((i + 0.5) * len(known) / num_rows)] for i in range(num_rows)]


def assume_lengths(mean_tokens: float, longest_tokens: int) -> RowLengths:
    """Return assumed lengths of rows with a known mean and maximum only.

    >>> rows = assume_lengths(300.0, 1024)
    >>> rows.lengths[0], rows.lengths[-1], round(sum(rows.lengths) / len(rows.lengths))
    (33, 1024, 300)
    """
    if mean_tokens >= _EQUAL_SHARE * longest_tokens:
        return RowLengths(mean_tokens=mean_tokens)
    normal = NormalDist(sigma=_SIGMA)
    points = [(i + 0.5) / _NUM_ASSUMED for i in range(_NUM_ASSUMED)]
    shape = [math.exp(normal.inv_cdf(one)) for one in points]
    low, high = 0.0, float(longest_tokens)
    # Truncation at the maximum lowers the mean in no closed form, so bisect for the scale.
    for _ in range(40):
        middle = (low + high) / 2
        found = sum(min(longest_tokens, middle * one) for one in shape) / len(shape)
        low, high = (middle, high) if found < mean_tokens else (low, middle)
    lengths = tuple(max(1, round(min(longest_tokens, high * one))) for one in shape)
    return RowLengths(mean_tokens=mean_tokens, lengths=lengths)


def pick_lengths(lengths: Iterable[int], most_tokens: int) -> tuple[int, ...]:
    """Return a few typical lengths, truncated to `most_tokens`, in ascending order.

    >>> pick_lengths([30, 10, 99], 50)
    (10, 30, 50)
    """
    ordered = sorted(min(one, most_tokens) for one in lengths)
    if len(ordered) <= _MAX_ROWS:
        return tuple(ordered)
    return tuple(RowLengths(mean_tokens=0.0, lengths=tuple(ordered)).draw(_MAX_ROWS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Micro-batches of a rank's part of a batch."""

    sizes: tuple[int, ...]
    """Tokens of each micro-batch, padding included."""
    num_tokens: int
    """Tokens of all rows, without padding."""


@functools.lru_cache(maxsize=512)
def divide(rows: RowLengths, num_rows: int, micro_tokens: int, *, padded: bool) -> Division:
    """Return the micro-batches of typical rows.

    Args:
        rows: lengths of the run's rows.
        num_rows: number of rows of this rank; beyond 256 the division of 256 rows is returned.
        micro_tokens: limit of a micro-batch, in tokens.
        padded: whether micro-batches are filled and padded to repeating sizes, for replay. Rows
            that all have one length, a multiple of 64, need no padding.

    >>> chat = RowLengths(mean_tokens=20, lengths=(10, 20, 30))
    >>> divide(chat, 6, 60, padded=False).sizes
    (60, 60)
    >>> divide(chat, 6, 640, padded=True)
    Division(sizes=(128,), num_tokens=120)
    """
    drawn = rows.draw(min(num_rows, _MAX_ROWS))
    longest = round_up_tokens(max(drawn))
    groups = group_examples(drawn, micro_tokens, is_filled=padded)
    lengths = [[drawn[place] for place in group] for group in groups]
    sizes = (find_size(one, micro_tokens, longest) if padded else sum(one) for one in lengths)
    return Division(sizes=tuple(sizes), num_tokens=sum(drawn))

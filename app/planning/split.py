"""Split a global batch into whole sequences, as agents/trainer/parallel/shares.py does."""

from __future__ import annotations

from itertools import accumulate, pairwise


def split_rows(num_rows: int, weights: list[float]) -> list[int]:
    """Return the sequences of a batch for each rank.

    Cards with 87.9, 58.3 and 43.5 TFLOP/s, and a batch of 24:

    >>> split_rows(24, [87.9, 58.3, 43.5])
    [11, 7, 6]
    """
    scale = num_rows / sum(weights)
    cuts = [0, *(min(num_rows, round(end * scale)) for end in accumulate(weights))]
    cuts[-1] = num_rows  # rounding may leave the last cut one short
    return [stop - start for start, stop in pairwise(cuts)]

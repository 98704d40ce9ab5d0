"""Choose the rows of each step, as a pure function of seed, epoch and global step.

Ranks do not matter, so the order is the same on any number of GPUs, and the position in the data is
one integer. Epochs are laid end to end and split into batches, so every batch is full: the last
batch of an epoch takes its missing rows from the next one, and the last batch of a run may contain
a few rows of an epoch that was not requested.

Only the raw stream of NumPy's Philox is used, which NumPy guarantees never to change. It gives no
such guarantee for `permutation`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_WORD = 1 << 64


def count_steps(*, epochs: float, num_rows: int, batch: int, max_steps: int | None) -> int:
    """Return the number of optimizer steps of a run.

    >>> count_steps(epochs=3, num_rows=100, batch=24, max_steps=None)
    13
    """
    if max_steps is not None:
        return max_steps
    # Rounded first: 1.1 epochs of 10 rows are 11.000000000000002 in floating point.
    return max(1, math.ceil(round(epochs * num_rows, 6) / batch))


@lru_cache(maxsize=2)  # a batch may reach into the next epoch; 80 MB for 10 million rows
def shuffle_epoch(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the order of all rows in one epoch."""
    philox = np.random.Philox(key=np.array([seed % _WORD, epoch], dtype=np.uint64))
    return np.argsort(philox.random_raw(num_rows), kind="stable")


def choose_rows(*, seed: int, step: int, batch: int, num_rows: int) -> list[int]:
    """Return the rows of the global batch of `step` (from 1), as indices from 0, in order."""
    first = (step - 1) * batch
    return [
        int(shuffle_epoch(seed, place // num_rows, num_rows)[place % num_rows])
        for place in range(first, first + batch)
    ]


def epoch_at(*, step: int, batch: int, num_rows: int) -> float:
    """Return the number of epochs completed after `step`, with its fraction."""
    return step * batch / num_rows


def hash_rows(row_numbers: Sequence[int]) -> str:
    """Return a short hash of the rows of a batch, to compare two runs step by step."""
    text = ",".join(map(str, row_numbers))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

"""Choose the rows of each step, as a pure function of seed, epoch, global step and sources.

Ranks do not matter, so the order is the same on any number of GPUs, and the position in the data is
one integer. Epochs are laid end to end and split into batches, so every batch is full: the last
batch of an epoch takes its missing rows from the next one, and the last batch of a run may contain
a few rows of an epoch that was not requested.

An epoch takes weight x rows (rounded) of each source, at least one. Epoch after epoch continues
where the last one stopped, in a fixed order of the source's rows: after any number of epochs, two
rows of a source were taken equally often, or one of them once more.

Only the raw stream of NumPy's Philox is used, which NumPy guarantees never to change. It gives no
such guarantee for `permutation`.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from agents.contract.spec import RunSpec

_WORD = 1 << 64
# Epochs are small numbers, so the orders of sources have keys of their own.
_SOURCE_KEY = 1 << 63


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


@lru_cache(maxsize=8)
def _shuffle_source(seed: int, source: int, num_rows: int) -> npt.NDArray[np.int64]:
    return shuffle_epoch.__wrapped__(seed, _SOURCE_KEY + source, num_rows)


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Order of a run's rows, of all sources together."""

    seed: int
    sizes: tuple[int, ...]
    """Number of rows of each source; their indices follow each other."""
    taken: tuple[int, ...]
    """Number of rows that an epoch takes of each source."""
    shuffles: bool = True

    @property
    def num_rows(self) -> int:
        """Number of rows of an epoch."""
        return sum(self.taken)

    def choose(self, *, step: int, batch: int) -> list[int]:
        """Return the rows of the global batch of `step` (from 1), as indices from 0, in order."""
        first, size = (step - 1) * batch, self.num_rows
        return [self._find(*divmod(place, size)) for place in range(first, first + batch)]

    def count_steps(self, spec: RunSpec) -> int:
        """Return the number of optimizer steps of a run."""
        return count_steps(
            epochs=spec.epochs,
            num_rows=self.num_rows,
            batch=spec.batch_sequences,
            max_steps=spec.max_steps,
        )

    def _find(self, epoch: int, place: int) -> int:
        if self.shuffles:
            place = int(shuffle_epoch(self.seed, epoch, self.num_rows)[place])
        ends = list(accumulate(self.taken))
        source = bisect.bisect_right(ends, place)
        size, taken = self.sizes[source], self.taken[source]
        index = (epoch * taken + place - ends[source] + taken) % size
        # Of a part of the rows each epoch takes a random one, unless every epoch is whole.
        if self.shuffles and taken % size:
            index = int(_shuffle_source(self.seed, source, size)[index])
        return sum(self.sizes[:source]) + index


def order_rows(spec: RunSpec, sizes: Sequence[int]) -> DataOrder:
    """Return the order of a run's rows.

    Args:
        spec: source of seed, weights and whether rows are shuffled.
        sizes: number of examples of each source.

    >>> from agents.contract.data import SourceSpec
    >>> from agents.contract.spec import DataSpec
    >>> sources = (SourceSpec(path="a", weight=2), SourceSpec(path="b", weight=0.5))
    >>> spec = RunSpec(model="m", data=DataSpec(train="a", sources=sources, shuffle=False))
    >>> order = order_rows(spec, (2, 4))
    >>> [order.choose(step=epoch, batch=order.num_rows) for epoch in (1, 2)]
    [[0, 1, 0, 1, 2, 3], [0, 1, 0, 1, 4, 5]]
    """
    weights = [source.weight for source in spec.data.list_sources()]
    taken = (max(1, math.floor(w * size + 0.5)) for w, size in zip(weights, sizes, strict=True))
    return DataOrder(spec.seed, tuple(sizes), tuple(taken), spec.data.shuffle)


def epoch_at(*, step: int, batch: int, num_rows: int) -> float:
    """Return the number of epochs completed after `step`, with its fraction."""
    return step * batch / num_rows


def hash_rows(row_numbers: Sequence[int]) -> str:
    """Return a short hash of the rows of a batch, to compare two runs step by step."""
    text = ",".join(map(str, row_numbers))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

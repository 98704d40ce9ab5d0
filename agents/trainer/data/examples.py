"""Units of a batch: examples, each of one or more segments of tokens.

An example is the unit of the data order: one row in supervised fine-tuning, several rows with
packing, one pair in preference training. A segment is a sequence of tokens that attends only to
itself: attention never crosses its bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Number of misfits after which a micro-batch counts as full.
_MAX_MISFITS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One tokenized row, or one conversation of a pair."""

    row: int
    """Number of the row in its file, from 1."""
    ids: npt.NDArray[np.int32]
    """Token ids (T,)."""
    is_target: npt.NDArray[np.bool_]
    """Mask of the tokens whose prediction counts (T,); never True for the first token."""
    weights: npt.NDArray[np.float32] | None = None
    """Weight of each token whose prediction counts (T,), above 0; None: 1."""

    @property
    def num_targets(self) -> int:
        return int(self.is_target.sum())

    @property
    def weight(self) -> float:
        """Sum of the weights of its targets."""
        if self.weights is None:
            return self.num_targets
        return float(self.weights[self.is_target].sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Example:
    """One unit of a batch. A pair has two segments: the chosen answer, then the rejected one."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def num_targets(self) -> int:
        return sum(segment.num_targets for segment in self.segments)

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of the rows in the example, each once."""
        return tuple(dict.fromkeys(segment.row for segment in self.segments))


class Examples(Protocol):
    """All examples of a run in file order, possibly far larger than memory."""

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]:
        """Number of tokens of each example (N,)."""

    @property
    def weights(self) -> npt.NDArray[np.int32] | npt.NDArray[np.float64]:
        """Contribution of each example to a batch's denominator (N,): its targets, or the sum of
        their weights; 1 for a pair.
        """

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of examples of each source, whose examples follow each other."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPart:
    """Slice of a batch that one rank processes."""

    examples: Sequence[Example]
    places: Sequence[int]
    """Index of each example in the data; evaluation examples are numbered after all others."""
    positions: Sequence[int]
    """Place of each example in the global order; keys its dropout masks."""

    def pick(self, group: Sequence[int]) -> BatchPart:
        """Return some of the examples."""
        return BatchPart(
            examples=[self.examples[i] for i in group],
            places=[self.places[i] for i in group],
            positions=[self.positions[i] for i in group],
        )


def choose_examples(examples: Examples, max_tokens: int) -> BatchPart:
    """Return the longest example, then the first ones that fit into `max_tokens` in total.

    If there are too few examples, it starts again at the first one.
    """
    lengths = examples.num_tokens
    # The longest one first: memory and compiled sizes must be those of the worst case.
    places = [int(lengths.argmax())]
    num_tokens = int(lengths[places[0]])
    num_misfits = 0
    for number in itertools.count():
        place = number % len(examples)
        if num_tokens + int(lengths[place]) <= max_tokens:
            num_tokens += int(lengths[place])
            places.append(place)
        else:
            num_misfits += 1
        if num_misfits > _MAX_MISFITS:
            break
    return BatchPart(
        examples=[examples[place] for place in places],
        places=places,
        positions=list(range(len(places))),
    )

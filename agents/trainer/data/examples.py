"""What a batch is made of: examples, each of one or more segments of tokens.

An example is the unit of the data order. In supervised fine-tuning it is one row, or with packing
several rows side by side; in preference training it is one pair. A segment is a run of tokens that
sees itself only: attention never crosses its ends, whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Segment:
    """One row, or one answer of a pair, as the model sees it."""

    row: int
    """Number of the row in its file, from 1."""
    ids: npt.NDArray[np.int32]
    """Token ids (T,)."""
    is_target: npt.NDArray[np.bool_]
    """Whether the prediction of this token counts (T,); never true for the first one."""

    @property
    def num_targets(self) -> int:
        return int(self.is_target.sum())


@dataclass(frozen=True, slots=True)
class Example:
    """One unit of a batch. A pair has exactly two segments: the chosen answer, the rejected one."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def num_targets(self) -> int:
        return sum(segment.num_targets for segment in self.segments)

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of the rows that the example is made of, each once."""
        return tuple(dict.fromkeys(segment.row for segment in self.segments))


class Examples(Protocol):
    """All examples of a run, in the order of their file; may be far larger than the memory."""

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]:
        """Tokens of each example (N,)."""

    @property
    def weights(self) -> npt.NDArray[np.int32]:
        """What each example adds to a batch's denominator (N,): its targets; 1 for a pair."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Examples of one rank."""

    examples: Sequence[Example]
    places: Sequence[int]
    """Index of each example in the data; those of evaluation come after all training examples."""
    positions: Sequence[int]
    """Place of each example in the global order, for the dropout."""

    def pick(self, group: Sequence[int]) -> Part:
        """Return some of the examples."""
        return Part(
            examples=[self.examples[i] for i in group],
            places=[self.places[i] for i in group],
            positions=[self.positions[i] for i in group],
        )


def choose_examples(examples: Examples, max_tokens: int) -> Part:
    """Return the longest example, and the first others as long as all have at most `max_tokens`."""
    lengths = examples.num_tokens
    places = [int(lengths.argmax())]
    num_tokens = int(lengths[places[0]])
    for place in range(len(examples)):
        num_tokens += int(lengths[place])
        if num_tokens > max_tokens:
            break
        places.append(place)
    return Part(
        examples=[examples[place] for place in places],
        places=places,
        positions=list(range(len(places))),
    )

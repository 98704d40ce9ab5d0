"""What a batch is made of: examples, each of one or more segments of tokens.

An example is the unit of the data order. In supervised fine-tuning it is one row, or with packing
several rows side by side; in preference training it is one pair. A segment is a run of tokens that
sees itself only: attention never crosses its ends, whatever stands beside it.
"""

from __future__ import annotations

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

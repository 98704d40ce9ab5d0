"""Examples of several sources, one after the other."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from agents.contract.data import DataFinding
from agents.trainer.data.examples import Example, Segment
from agents.trainer.data.store import ExampleSet
from agents.trainer.data.tally import Skipped


class JoinedExamples(ExampleSet):
    """The examples of all sources of a run.

    Rows are numbered through all sources, so that each has a number of its own.

    Args:
        members: name and examples of each source, at least one.
    """

    def __init__(self, members: Sequence[tuple[str, ExampleSet]]) -> None:
        self._members = tuple(members)
        sets = [examples for _, examples in members]
        names = ",".join(examples.folder.name for examples in sets)
        # The name of a folder of tokens hashes its content.
        self.folder = Path(hashlib.sha256(names.encode("ascii")).hexdigest()[:32])
        self.format = sets[0].format
        self.vocab_size = max(examples.vocab_size for examples in sets)
        self.num_rows = sum(examples.num_rows for examples in sets)
        self.num_skipped = sum(examples.num_skipped for examples in sets)
        self.num_malformed = sum(examples.num_malformed for examples in sets)
        self.num_truncated = sum(examples.num_truncated for examples in sets)
        self.skipped = tuple(name_row(n, row) for n, one in members for row in one.skipped)
        self.truncated = tuple(name_row(n, row) for n, one in members for row in one.truncated)
        self.findings = tuple(name_finding(n, f) for n, one in members for f in one.findings)
        self.num_tokens = np.concatenate([examples.num_tokens for examples in sets])
        self.num_targets = np.concatenate([examples.num_targets for examples in sets])
        self.weights = np.concatenate([examples.weights for examples in sets])  # float64 if any is
        labels = [examples.labels for examples in sets if examples.labels is not None]
        self.labels = np.concatenate(labels) if len(labels) == len(sets) else None
        self.choice = None
        self._starts_at = [0, *accumulate(len(examples) for examples in sets)]
        self._rows_before = [0, *accumulate(examples.num_rows for examples in sets)]

    @property
    def members(self) -> tuple[tuple[str, ExampleSet], ...]:
        return self._members

    def __getitem__(self, index: int) -> Example:
        source = bisect_right(self._starts_at, index) - 1
        example = self._members[source][1][index - self._starts_at[source]]
        before = self._rows_before[source]
        return Example(
            tuple(
                Segment(one.row + before, one.ids, one.is_target, one.weights)
                for one in example.segments
            )
        )

    def first_rows(self, count: int) -> list[tuple[Segment, ...]]:
        return [row for _, member in self._members for row in member.first_rows(count)][:count]


def name_row(source: str, row: Skipped) -> Skipped:
    """Return a row with the name of its source, and of its file if the source has several."""
    return replace(row, file="/".join(filter(None, (source, row.file))))


def name_finding(source: str, found: DataFinding) -> DataFinding:
    """Return a finding with the name of its source."""
    return replace(found, source=source)

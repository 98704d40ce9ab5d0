"""What was left out of the data, and when that is too much.

The one rule: a row without anything to learn, or one that is malformed, is left out, counted, and
named with its reason (the first 20). Where more than 10 rows and more than 5 % of all are
malformed, the file is not what its reader takes it for, and nothing is trained. A file that cannot
be cut into rows at all (an open quote in a CSV file, say) is refused by its reader.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from agents.errors import ExpectedError

MAX_MALFORMED = 10
MAX_MALFORMED_SHARE = 0.05
BLANK = "the line is empty"
NUM_NAMED = 20
"""How many rows that were left out are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row that was left out, or cut, and why."""

    row: int
    """Line of the file, or place in its list, from 1."""
    reason: str
    malformed: bool = False
    """Whether the row is broken; else it has nothing to learn."""
    file: str = ""
    """Name of its file, where there are several."""

    @property
    def in_words(self) -> str:
        """The reason, with the name of the file where there are several."""
        return f"{self.file}: {self.reason}" if self.file else self.reason


class FirstRows:
    """Keeps the first rows in their order, though they come out of it.

    Whether a row can be read is known before the rows ahead of it are tokenized.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows: list[Skipped] = []
        self._places: list[int] = []
        self._max = max_rows

    def add(self, row: Skipped, place: int) -> None:
        """Take in a row, unless all that are kept come before it."""
        at = bisect.bisect(self._places, place)
        self.rows.insert(at, row)
        self._places.insert(at, place)
        del self.rows[self._max :], self._places[self._max :]


@dataclass(slots=True)
class Tally:
    """Counts the rows of one set of data while they are read."""

    name: str
    """Of the data, for messages."""
    num_rows: int = 0
    num_skipped: int = 0
    num_malformed: int = 0
    num_blank: int = 0
    """Rows left out that are nothing but a line's end."""
    num_truncated: int = 0
    """Rows that were longer than the longest sequence and lost their end."""
    _skipped: FirstRows = field(default_factory=lambda: FirstRows(NUM_NAMED))
    _truncated: FirstRows = field(default_factory=lambda: FirstRows(NUM_NAMED))
    _malformed: FirstRows = field(default_factory=lambda: FirstRows(1))

    @property
    def named(self) -> list[Skipped]:
        """The first that were left out."""
        return self._skipped.rows

    @property
    def truncated(self) -> list[Skipped]:
        """The first that lost their end; the reason is their length."""
        return self._truncated.rows

    def skip(self, skipped: Skipped, place: int) -> None:
        """Count a row that is left out; `place` is its number among the rows of all files."""
        self.num_skipped += 1
        self.num_blank += skipped.reason == BLANK
        if skipped.malformed:
            self.num_malformed += 1
            self._malformed.add(skipped, place)
        self._skipped.add(skipped, place)

    def truncate(self, named: Skipped, place: int) -> None:
        """Count a row that loses its end."""
        self.num_truncated += 1
        self._truncated.add(named, place)

    def check_usable(self, num_kept: int) -> None:
        """Check at the end that what is left is worth training on.

        Raises:
            ExpectedError: no row is left, or too many are malformed.
        """
        too_many = max(MAX_MALFORMED, MAX_MALFORMED_SHARE * self.num_rows)
        first = next(iter(self._malformed.rows), None)
        if first is not None and self.num_malformed > too_many and num_kept:
            raise ExpectedError(
                f"{self.name}: {self.num_malformed} of {self.num_rows} rows are malformed, the "
                f"first in {_place(first)}: {first.reason}.",
                "Correct them, or name the right data.format; up to 5 % may be malformed "
                "and are left out",
            )
        if num_kept:
            return
        hint = "Give data with at least one row to learn from"
        if self.num_blank == self.num_skipped:
            raise ExpectedError(f"{self.name} is empty.", hint)
        worst = first or self.named[0]
        which = f"all {self.num_skipped} were left out (the first, {_place(worst)}"
        if self.num_skipped == 1:
            which = f"its only one was left out ({_place(worst)}"
        raise ExpectedError(f"{self.name} has no usable row: {which}: {worst.reason}).", hint)


def _place(skipped: Skipped) -> str:
    return f"{skipped.file}, row {skipped.row}" if skipped.file else f"row {skipped.row}"

"""Count skipped rows, and decide when there are too many.

A row that is malformed or has no target is skipped and counted; the first 20 are listed with their
reasons. If more than 10 rows and more than 5 % of all rows are malformed, the format was probably
misjudged, and training stops before it starts. A file that cannot be split into rows, such as a CSV
file with an open quote, is rejected by its reader.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field, replace

from agents.contract.data import DataFinding
from agents.errors import ExpectedError
from agents.shared.data.findings import MESSAGES, describe_cut
from agents.shared.data.meaning import KIND
from agents.trainer.data.answers import Note

MAX_MALFORMED = 10
MAX_MALFORMED_SHARE = 0.05
BLANK = "the line is empty"
NUM_NAMED = 20
"""Maximum number of skipped rows that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row that was skipped or truncated, and why."""

    row: int
    """Line of the file, or index in its list, from 1."""
    reason: str
    malformed: bool = False
    """True if the row is malformed, False if it only has no target."""
    file: str = ""
    """Name of its file; empty if there is only one."""
    num_tokens: int = 0
    """Number of tokens of a row skipped because its targets exceed the maximum length."""

    @property
    def in_words(self) -> str:
        """Reason, preceded by the file's name if there are several files."""
        return f"{self.file}: {self.reason}" if self.file else self.reason


class NoUsableRow(ExpectedError):
    """Raised for data of which no row remains."""


class FirstRows:
    """Keeps the first rows in order, although they arrive out of order.

    Rows are read ahead and tokenized in groups, so the reader may skip a later row before the
    tokenizer skips an earlier one.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows: list[Skipped] = []
        self._places: list[int] = []
        self._max = max_rows

    def add(self, row: Skipped, place: int) -> None:
        """Insert a row, unless it comes after all rows of a full list."""
        at = bisect.bisect(self._places, place)
        self.rows.insert(at, row)
        self._places.insert(at, place)
        # The last of a full list is dropped again if the new row came after it.
        del self.rows[self._max :], self._places[self._max :]


@dataclass(slots=True)
class Tally:
    """Counts the rows of one data set while they are read."""

    name: str
    """Name of the data set in messages."""
    num_rows: int = 0
    num_skipped: int = 0
    num_malformed: int = 0
    num_blank: int = 0
    """Number of skipped rows that are empty lines."""
    num_truncated: int = 0
    """Number of rows truncated to the maximum sequence length."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of rows per message key that the chat template leaves out."""
    template_keys: Counter[str] = field(default_factory=Counter)
    """Number of rows per message key that the chat template received."""
    notes: Counter[Note] = field(default_factory=Counter)
    """Number of rows per difference from a chat with the model."""
    num_rendered: int = 0
    """Number of rows that were rendered."""
    offer: str = ""
    """Advice by which rows might be read that match no format, or are not UTF-8."""
    _tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    _skipped: FirstRows = field(default_factory=lambda: FirstRows(NUM_NAMED))
    _truncated: FirstRows = field(default_factory=lambda: FirstRows(NUM_NAMED))
    _malformed: FirstRows = field(default_factory=lambda: FirstRows(1))

    @property
    def named(self) -> list[Skipped]:
        """First skipped rows."""
        return self._skipped.rows

    @property
    def truncated(self) -> list[Skipped]:
        """First truncated rows; the reason is their length."""
        return self._truncated.rows

    def skip(self, skipped: Skipped, place: int) -> None:
        """Count a skipped row; `place` is its number across all files."""
        self.num_skipped += 1
        self.num_blank += skipped.reason == BLANK
        if skipped.malformed:
            self.num_malformed += 1
            self._malformed.add(skipped, place)
        self._skipped.add(skipped, place)

    def truncate(self, named: Skipped, place: int) -> None:
        """Count a truncated row."""
        self.num_truncated += 1
        self._truncated.add(named, place)

    def count_tokens(self, file: str, num_tokens: int, num_cut: int) -> None:
        """Count the tokens of a row, and those that are cut."""
        total, cut = self._tokens.get(file, (0, 0))
        self._tokens[file] = total + num_tokens, cut + num_cut

    def find_cut(self) -> tuple[DataFinding, ...]:
        """Return the finding of cut tokens; with several files it names the worst one."""
        total, cut = map(sum, zip((0, 0), *self._tokens.values(), strict=True))
        if len(self._tokens) < 2:
            return describe_cut(total, cut)
        # One bad file would disappear in the total of a large folder.
        shares = {name: cut / max(1, total) for name, (total, cut) in self._tokens.items()}
        worst = max(shares, key=lambda name: shares[name])
        return describe_cut(total, cut, worst, shares[worst])

    def find_notes(self) -> tuple[DataFinding, ...]:
        """Return the findings about differences between rows and a chat with the model."""
        return tuple(
            DataFinding(
                kind=kind,
                column=column,
                count=count,
                total=self.num_rendered,
                consequence=KIND[kind].otherwise,
            )
            for (kind, column), count in self.notes.items()
        )

    def merge_template(self, found: DataFinding) -> DataFinding | None:
        """Return a finding adapted to the chat template; None if the template uses the key."""
        if found.kind == "tooled":  # the notes name tools that the template leaves out
            return None
        key = found.column.removeprefix(MESSAGES)
        is_thought = found.kind == "thought"
        if key not in self.template_keys or (key == found.column and not is_thought):
            return found
        if found.kind not in ("reasoning", "thought", "unknown"):
            return found
        # A preview reads more rows than it renders, so the count is extrapolated.
        count = round(found.count * self.dropped[key] / self.template_keys[key])
        consequence = "warn" if is_thought else found.consequence
        return (
            replace(found, kind="template", count=count, consequence=consequence) if count else None
        )

    def check_usable(self, num_kept: int) -> None:
        """Check that the remaining rows are worth training on, once all have been read.

        Raises:
            ExpectedError: no row remains, or too many are malformed.
        """
        # Both limits: a fraction alone would reject a tiny file for one bad row.
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
        hint = self.offer or "Give data with at least one row to learn from"
        if self.num_blank == self.num_skipped:
            raise NoUsableRow(f"{self.name} is empty.", hint)
        worst = first or self.named[0]
        which = f"all {self.num_skipped} were left out (the first, {_place(worst)}"
        if self.num_skipped == 1:
            which = f"its only one was left out ({_place(worst)}"
        raise NoUsableRow(f"{self.name} has no usable row: {which}: {worst.reason}).", hint)


def _place(skipped: Skipped) -> str:
    return f"{skipped.file}, row {skipped.row}" if skipped.file else f"row {skipped.row}"

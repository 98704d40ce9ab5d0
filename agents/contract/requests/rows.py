"""Requests to the program that looks through the rows of data on the master, and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agents.contract.data import ShownRow
from agents.contract.spec import RunSpec

RowFilter = Literal["all", "left_out", "cut", "duplicate", "longest", "least_learned"]
"""Rows to list; the last two are sorted, the others are in the order of the data."""
RowState = Literal["kept", "left_out", "cut", "duplicate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrowseJob:
    """Data to look through."""

    spec: RunSpec
    path: str
    """File or folder on this PC, or the hub id of data in the cache."""
    model_path: str = ""
    """Folder with the tokenizer; empty: rows are read without one."""
    held_out_from: str | None = None
    """Training data of the run, if `path` is its evaluation data."""
    split: str | None = None
    """Name of the split to read; None: the usual one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequest:
    """Rows to list, or one row to show."""

    start: int = 0
    """Number of listed rows before the first one."""
    count: int = 100
    which: RowFilter = "all"
    search: str = ""
    """Text that a row contains, in any case; empty: any row."""
    place: int | None = None
    """Place of the row to show; None: list rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBrief:
    """A row in a list."""

    place: int
    """Number across all files, from 1."""
    row: int
    """Number in its file, from 1."""
    file: str = ""
    """Name of its file, if there are several."""
    text: str = ""
    """Beginning of its texts."""
    num_tokens: int | None = None
    """Number of tokens before truncation; None: not counted yet."""
    num_targets: int | None = None
    """Number of learned tokens; None: not counted yet."""
    state: RowState = "kept"
    reason: str = ""
    """Reason why it is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowList:
    rows: tuple[RowBrief, ...]
    num_rows: int
    """Number of rows that match, as far as they are known."""
    is_whole: bool
    """True if no other row matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRow:
    """A row as written, and as a run learns it."""

    brief: RowBrief
    raw: str
    """Its columns, as JSON."""
    shown: ShownRow | None = None
    """None: it is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFigures:
    """Rows of one file."""

    name: str
    num_rows: int
    num_tokens: int
    num_left_out: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFigures:
    """Numbers of all rows that are read so far."""

    format: str = "auto"
    num_rows: int = 0
    share: float = 0.0
    """Share of the data that is read, 0 to 1."""
    is_whole: bool = False
    is_tokenized: bool = False
    """False: tokens are estimated from characters."""
    num_left_out: int = 0
    num_cut: int = 0
    num_duplicates: int = 0
    """Number of rows that repeat an earlier one exactly."""
    num_tokens: int = 0
    num_targets: int = 0
    """Number of learned tokens."""
    lengths: tuple[int, ...] = ()
    """Number of rows with at most 1, 2, 4, 8 and so on tokens."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Number of rows by the reason why they are left out."""
    sources: tuple[SourceFigures, ...] = ()
    columns: tuple[str, ...] = ()
    """Names of the columns of the first rows."""
    offer: str = ""
    """Sentence with a setting, as a line of a run file, that may read rows that are left out."""
    problem: str = ""
    """Reason why reading ended early; empty: it did not."""

    @property
    def has_nothing(self) -> bool:
        """True if every row so far is left out."""
        return self.num_rows > 0 and self.num_left_out == self.num_rows

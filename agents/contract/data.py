"""Preview of training data: the examples that rows become, and the tokens that are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRow:
    """A row with a problem."""

    row: int
    """Line of the file, or position in its list, from 1."""
    reason: str
    file: str = ""
    """Name of its file, if there are several."""
    malformed: bool = False
    """True if the row is broken; False if it has nothing to learn, or is too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPart:
    text: str
    learned: bool
    """True if the loss counts these tokens; False if they are only context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownConversation:
    num_tokens: int
    num_targets: int
    """Number of tokens that the loss counts."""
    parts: tuple[ShownPart, ...]
    """Text in the order in which the model reads it; a long conversation is shortened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    row: int
    conversations: tuple[ShownConversation, ...]
    """The conversation; for a preference pair the chosen and the rejected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFinding:
    """Part of the data that a run would not learn, or would learn wrongly."""

    kind: str
    """Kind, a key of `meaning.KINDS`."""
    column: str
    """Column, key of a message (`messages[].KEY`) or marker in the texts; empty for `cut`."""
    count: int
    """Number of affected rows; for `cut` the number of tokens."""
    total: int
    """Number of rows, or tokens, that were read."""
    consequence: Literal["refuse", "warn", "note"]
    row: int | None = None
    """Number of the first affected row in its file, from 1; None: not known."""
    file: str = ""
    """File of that row, if there are several; for `cut` the file that loses the largest share."""
    file_share: float | None = None
    """Share of that file's tokens that is cut, 0 to 1."""

    @property
    # Nothing was read: no share is affected.
    def share(self) -> float:
        return self.count / max(1, self.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPreview:
    """Data as a run will learn it. Also the journal record `preview`, written before training."""

    format: str
    """Detected format: `chat`, `alpaca`, `text` or `preference`."""
    whole: bool
    """True if all rows were read; False: only the first `num_rows`, to which every number
    refers."""
    num_rows: int
    """Number of rows, including skipped ones."""
    num_examples: int
    """Units of a batch: rows, packs of rows, or pairs."""
    num_tokens: int
    num_targets: int
    """Number of tokens that the loss counts."""
    longest_tokens: int
    """Length of the longest example, after truncation."""
    sequence_tokens: int
    """Length at which rows are truncated."""
    fill: float | None = None
    """Mean share of a pack that holds tokens, 0 to 1; None: rows are not packed."""
    num_skipped: int = 0
    """Number of skipped rows, including malformed ones."""
    num_malformed: int = 0
    num_truncated: int = 0
    """Number of truncated rows."""
    skipped: tuple[NamedRow, ...] = ()
    """First skipped rows."""
    truncated: tuple[NamedRow, ...] = ()
    """First truncated rows."""
    plain_template: bool = False
    """True if the tokenizer has no chat template, so Alpaca's is used."""
    rows: tuple[ShownRow, ...] = ()
    """First usable rows."""
    findings: tuple[DataFinding, ...] = ()
    """Data that is not learned, or learned wrongly; refused data comes first."""

    @property
    def is_refused(self) -> bool:
        """True if a run refuses this data."""
        return any(finding.consequence == "refuse" for finding in self.findings)

"""A preview of training data: what each row becomes, and which of its tokens are learned."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewJob:
    """Look data over as a run would see it; needs the model's tokenizer, and no GPU."""

    python: str
    spec: RunSpec
    model_path: str
    """Folder on this node (its tokenizer is enough), or the hub id."""
    train_path: str
    held_out_from: str | None = None
    """The run's training data, where `train_path` is what it is evaluated with."""
    whole: bool = True
    """Tokenize all rows, and keep the tokens for the run; False: look at the first rows only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRow:
    """A row of which something has to be said."""

    row: int
    """Line of the file, or place in its list, from 1."""
    reason: str
    file: str = ""
    """Name of its file, where there are several."""
    malformed: bool = False
    """The row is broken; else it has nothing to learn, or is too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPart:
    text: str
    learned: bool
    """The prediction of these tokens is trained; else they are only read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownConversation:
    num_tokens: int
    num_targets: int
    """Tokens that are learned."""
    parts: tuple[ShownPart, ...]
    """The text in order, as the model reads it; of a long one parts are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    row: int
    conversations: tuple[ShownConversation, ...]
    """One; of a preference pair the chosen and the rejected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPreview:
    """What a run will learn. Also a rank's journal record `preview`, written before training."""

    format: str
    """What was recognised: `chat`, `alpaca`, `text` or `preference`."""
    whole: bool
    """All rows were read; False: only the first `num_rows`, and every number is of those."""
    num_rows: int
    """Rows of the data, with those left out."""
    num_examples: int
    """Units of a batch: rows, packs of rows, or pairs."""
    num_tokens: int
    num_targets: int
    """Tokens that are learned."""
    longest_tokens: int
    """Of one example, after the cut."""
    sequence_tokens: int
    """Where rows are cut."""
    fill: float | None = None
    """Mean share of a pack that holds tokens, 0 to 1; None: rows are not packed."""
    num_skipped: int = 0
    """Rows left out, the malformed ones among them."""
    num_malformed: int = 0
    num_truncated: int = 0
    """Rows that lose their end."""
    skipped: tuple[NamedRow, ...] = ()
    """The first rows that are left out."""
    truncated: tuple[NamedRow, ...] = ()
    """The first rows that lose their end."""
    plain_template: bool = False
    """The tokenizer has no chat template, so conversations are written in Alpaca's words."""
    rows: tuple[ShownRow, ...] = ()
    """The first rows of use."""

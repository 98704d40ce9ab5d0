"""Objectives and formats of training data, one row each, read by run files, plans, forms and
trainer.

No other code compares their names. A new objective is a row here, its loss in
`agents/trainer/objectives`, and a row in that folder's `registry.py`. If it reads rows of a new
kind, it also needs a format here, which `agents/shared/data/columns.py` recognizes and
`agents/trainer/data/conversations.py` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Objective = Literal["sft", "dpo"]
RowFormat = Literal["chat", "alpaca", "text", "preference"]
DataFormat = Literal["auto", RowFormat]
LOSS = "loss"
"""Name of the first sum of every objective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormatTraits:
    """Properties of a format of training rows."""

    name: RowFormat
    """Value of `data.format` in a run file."""
    summary: str
    """Label of the choice in a form."""
    rows: str
    """Noun for its rows, in sentences."""
    description: str
    """Description of its rows and their learned part, in sentences."""
    contents: str = ""
    """Special contents that only some objectives can use, as words in brackets; empty: ordinary
    text."""
    num_segments: int = 1
    """Number of sequences that a row becomes."""
    is_text: bool = False
    """True if its texts go to the model without a chat template."""


ROW_FORMATS: dict[str, RowFormatTraits] = {
    row.name: row
    for row in (
        RowFormatTraits(
            name="chat",
            rows="chat rows",
            summary="Chat: a list of messages",
            description="conversations; the assistant's answers are learned",
        ),
        RowFormatTraits(
            name="alpaca",
            rows="instruction rows",
            summary="Instruction, input, output",
            description="instructions and answers; the answers are learned",
        ),
        RowFormatTraits(
            name="text",
            rows="text rows",
            summary="Plain text",
            description="plain text; all of it is learned",
            is_text=True,
        ),
        RowFormatTraits(
            name="preference",
            rows="preference pairs",
            summary="Preference pairs: chosen and rejected",
            description="preference pairs of a chosen and a rejected answer",
            contents="chosen and rejected answers",
            num_segments=2,
        ),
    )
}
"""Every format by its name in run files; the order is that of forms and messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A number that an objective reports in addition to the loss: a mean over the batch's
    weight.
    """

    name: str
    """Name of the sum, and of the field in records of steps and evaluations."""
    label: str
    """Title of its chart."""
    sentence: str = ""
    """Phrase for the event of an evaluation, with `{share}`; empty: the event omits it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveTraits:
    """Properties of an objective; its loss is in `agents/trainer/objectives`."""

    name: Objective
    """Value of `objective` in a run file."""
    label: str
    """Short name in sentences."""
    summary: str
    """Goal of the training, as a choice in a form."""
    formats: tuple[RowFormat, ...]
    """Formats of the rows that it reads."""
    gives: str
    """Rows that it needs, as words of a hint."""
    units: str
    """Noun for its rows, in the plural."""
    metrics: tuple[Metric, ...] = ()
    weighs_tokens: bool = False
    """True if the loss is a mean over tokens, so that its exponential is a perplexity; False if it
    is a mean over rows."""
    has_reference: bool = False
    """True if it compares with the model before the training: with an adapter by one more forward
    pass without it, else by a table made before the first step."""
    fuses_loss: bool = False
    """True if loss and gradient are computed from the logits in one pass, so that the backward pass
    does not compute the logits again."""
    packs: bool = False
    """True if several rows may share a sequence."""
    keys: tuple[str, ...] = ()
    """Keys of a run file that only this objective reads."""
    high_learning_rate: float | None = None
    """Learning rate above which it tends to ruin a model; None: the limit of every run."""
    usual_learning_rate: float = 2e-4
    """Recommended first learning rate."""

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of its sums over a batch: the loss, then its metrics."""
        return (LOSS, *(metric.name for metric in self.metrics))

    @property
    def num_segments(self) -> int:
        """Number of sequences that a row becomes."""
        return max(ROW_FORMATS[name].num_segments for name in self.formats)


OBJECTIVES: dict[str, ObjectiveTraits] = {
    row.name: row
    for row in (
        ObjectiveTraits(
            name="sft",
            label="SFT",
            summary="SFT: answer like the examples",
            formats=("chat", "alpaca", "text"),
            gives="chat, instruction or text rows",
            units="rows",
            weighs_tokens=True,
            fuses_loss=True,
            packs=True,
        ),
        ObjectiveTraits(
            name="dpo",
            label="DPO",
            summary="DPO: prefer one answer over another",
            formats=("preference",),
            gives="rows with 'prompt', 'chosen' and 'rejected'",
            units="pairs",
            metrics=(
                Metric(name="reward_margin", label="Reward margin"),
                Metric(
                    name="reward_accuracy",
                    label="Reward accuracy",
                    sentence="{share} of pairs ranked correctly",
                ),
            ),
            has_reference=True,
            keys=("dpo_beta",),
            # Rafailov et al. 2023 (arXiv:2305.18290, appendix B) train all weights with 1e-6;
            # adapters take more, but not a hundred times as much.
            high_learning_rate=1e-4,
            usual_learning_rate=5e-6,
        ),
    )
}
"""Every objective by its name in run files; the order is that of forms and hints."""
METRICS: dict[str, Metric] = {
    metric.name: metric for row in OBJECTIVES.values() for metric in row.metrics
}
"""Every metric by its name."""


def list_owners(key: str) -> tuple[str, ...]:
    """Return the names of the objectives that alone read a key of the run file.

    >>> list_owners("dpo_beta")
    ('dpo',)
    """
    return tuple(row.name for row in OBJECTIVES.values() if key in row.keys)


def find_readers(row_format: str) -> tuple[ObjectiveTraits, ...]:
    """Return the objectives that read rows of a format."""
    return tuple(row for row in OBJECTIVES.values() if row_format in row.formats)


def refuse_format(objective: str, row_format: str) -> str:
    """Return why an objective cannot read a format, to follow `data.format is`; empty: it can.

    >>> refuse_format("dpo", "alpaca")
    'alpaca; with objective dpo it must be auto or preference'
    >>> refuse_format("dpo", "auto")
    ''
    """
    allowed = ("auto", *OBJECTIVES[objective].formats)
    if row_format in allowed:
        return ""
    # Ordinary rows suit the usual objective; special ones were made for one objective.
    made_for = find_readers(row_format)[0].name if ROW_FORMATS[row_format].contents else ""
    other = f", or set objective: {made_for}" if made_for else ""
    return f"{row_format}; with objective {objective} it must be {join_or(allowed)}{other}"


def join_or(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> join_or(("auto",)), join_or(("auto", "chat")), join_or(("auto", "chat", "text"))
    ('auto', 'auto or chat', 'auto, chat or text')
    """
    return " or ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)

"""Preview of training data: the examples that rows become, the tokens that are learned, and the
names by which `data.columns` maps the data's own columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


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


# ------------------------------------------------------------------- columns

WANTED = ("messages", "instruction", "input", "output", "system", "text", "chosen", "rejected")
"""Names to which a column can be mapped."""
_ROLES = ("system", "user", "assistant", "tool")
_ROLE_PREFIX = "roles."


@dataclass(frozen=True, slots=True)
class ColumnNames:
    columns: dict[str, str]
    """Wanted name by the name in the data."""
    roles: dict[str, str]
    """Role of a message by the name in the data."""


def parse_columns(entries: Sequence[str]) -> ColumnNames:
    """Return the names that entries such as `instruction=question` map.

    Raises:
        ValueError: an entry has another form, or an unknown wanted name.

    >>> parse_columns(["instruction=question", "roles.user=customer"])
    ColumnNames(columns={'question': 'instruction'}, roles={'customer': 'user'})
    """
    found = ColumnNames({}, {})
    for entry in entries:
        wanted, _, name = (part.strip() for part in entry.partition("="))
        role = wanted.removeprefix(_ROLE_PREFIX)
        if not name:
            raise ValueError(
                f"columns has {entry!r}; it must be NAME=COLUMN, such as instruction=question"
            )
        if role != wanted and role in _ROLES:
            found.roles[name] = role
        elif wanted in WANTED:
            found.columns[name] = wanted
        else:
            known = ", ".join((*WANTED, *(f"{_ROLE_PREFIX}{role}" for role in _ROLES)))
            raise ValueError(f"columns names {wanted!r}; it must be one of {known}")
    return found


def flatten_columns(mapping: dict[str, object]) -> list[str]:
    """Return the entries of a mapping, as a run file may write them.

    >>> flatten_columns({"instruction": "question", "roles": {"customer": "user"}})
    ['instruction=question', 'roles.user=customer']
    """
    entries = []
    for wanted, name in mapping.items():
        if isinstance(name, dict):  # roles are written as in the data: {customer: user}
            entries += [f"{wanted}.{role}={own}" for own, role in name.items()]
        else:
            entries.append(f"{wanted}={name}")
    return entries


# ------------------------------------------------------------------- template options

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


def parse_options(entries: Sequence[str]) -> dict[str, Any]:
    """Return the variables of a chat template that entries such as `thinking=false` set.

    Raises:
        ValueError: an entry has another form, or sets a variable that every template gets.

    >>> parse_options(["enable_thinking=false", "reasoning_effort=high"])
    {'enable_thinking': False, 'reasoning_effort': 'high'}
    """
    found: dict[str, Any] = {}
    for entry in entries:
        name, sign, text = (part.strip() for part in entry.partition("="))
        if not (sign and text and name.isascii() and name.isidentifier()):
            raise ValueError(
                f"template_options has {entry!r}; it must be NAME=VALUE, such as "
                "enable_thinking=false"
            )
        if name in _RESERVED or name in found:
            why = "twice" if name in found else "which comes from the data or the model"
            raise ValueError(f"template_options sets {name}, {why}; leave it out")
        found[name] = _read_value(text)
    return found


def _read_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float, str)) else text


def flatten_options(mapping: dict[str, object]) -> list[str]:
    """Return the entries of a mapping, as a run file may write them.

    >>> flatten_options({"enable_thinking": False, "reasoning_effort": "high"})
    ['enable_thinking=false', 'reasoning_effort=high']
    """
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in mapping.items()
    ]

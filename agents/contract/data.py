"""Training data: its sources and its preview, and the names by which `data.columns` maps the data's
own columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agents.contract.objectives import DataFormat

MAX_WEIGHT = 100
"""Maximum weight of a source."""
MAX_LEFT_OUT_SHARE = 0.05
"""Share of rows, or of tokens, above which a run does not start without them unasked."""


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
    source: str = ""
    """Name of its source, if there are several."""


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
    source: str = ""
    """Name of the source, if there are several."""

    @property
    # Nothing was read: no share is affected.
    def share(self) -> float:
        return self.count / max(1, self.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """Part of a run's data that comes from one source."""

    name: str
    format: str
    num_rows: int
    num_examples: int
    num_tokens: int
    num_targets: int
    weight: float
    num_in_epoch: int
    """Number of examples of this source in an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChoice:
    """Rows that are usable, and those among them that are not trained."""

    num_usable: int = 0
    num_exact: int = 0
    """Number of rows that repeat an earlier row."""
    num_near: int = 0
    """Number of rows that are nearly an earlier row."""
    num_over: int = 0
    """Number of rows beyond `max_rows`."""
    num_held_out: int = 0
    """Number of rows that are evaluated instead."""
    is_split: bool = False
    """True if rows were to be held out."""


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
    num_blank: int = 0
    """Number of skipped rows that are empty lines."""
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
    sources: tuple[SourceShare, ...] = ()
    """Part of each source, if there are several."""
    choice: RowChoice | None = None
    """Rows that were chosen before training; None: all of them are trained."""

    @property
    def num_in_epoch(self) -> int:
        """Number of examples of an epoch."""
        return sum(one.num_in_epoch for one in self.sources) or self.num_examples

    @property
    def num_tokens_in_epoch(self) -> int:
        """Number of tokens of an epoch; of a source whose rows count in part, on average."""
        of_each = (one.num_tokens * one.num_in_epoch / one.num_examples for one in self.sources)
        return round(sum(of_each)) or self.num_tokens

    is_tokenized: bool = True
    """False: rows were only read, so numbers of tokens are 0, and cut tokens are the least that
    their texts can have."""

    @property
    def num_left_out(self) -> int:
        """Number of rows that are left out, without empty lines."""
        return self.num_skipped - self.num_blank

    @property
    def left_out_share(self) -> float:
        """Share of the rows that is left out, 0 to 1."""
        return self.num_left_out / max(1, self.num_rows - self.num_blank)

    @property
    def cut_share(self) -> float:
        """Share of the tokens that is cut, 0 to 1."""
        return max((one.share for one in self.findings if one.kind == "cut"), default=0.0)

    @property
    def loses_much(self) -> bool:
        """True if a run asks before it starts without the rows or tokens that are left out."""
        return max(self.left_out_share, self.cut_share) > MAX_LEFT_OUT_SHARE

    @property
    def is_refused(self) -> bool:
        """True if a run refuses this data."""
        return any(finding.consequence == "refuse" for finding in self.findings)


# ------------------------------------------------------------------- sources


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One source of training data, an item of `data.sources`."""

    path: str
    """File or folder, or a data set of the hub."""
    format: DataFormat | None = None
    """None: `data.format`."""
    columns: tuple[str, ...] = ()
    """Empty: `data.columns`."""
    weight: float = 1.0
    """Number of times that each of its rows counts in an epoch."""
    max_rows: int | None = None
    """Maximum number of its rows that are used; None: all."""
    split: str | None = None
    """Name of the split to read, such as `test`; None: the training split."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("path is empty; it must name a file or a hub dataset")
        parse_columns(self.columns)
        if not 0 < self.weight <= MAX_WEIGHT:  # also refuses NaN
            raise ValueError(
                f"weight is {self.weight:g}; it must be above 0 and at most {MAX_WEIGHT}"
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows is {self.max_rows}; it must be at least 1")
        if self.split is not None and not re.fullmatch(r"[\w.-]{1,96}", self.split):
            raise ValueError(f"split is {self.split!r}; it must be a name, such as validation")

    @property
    def is_plain(self) -> bool:
        """True if a run with this source alone needs no list of sources."""
        return self.weight == 1 and self.max_rows is None and self.split is None

    @property
    def name(self) -> str:
        """Name in sentences: the last part of a path, or the data set with its split."""
        name = self.path.rstrip("/\\")
        is_path = name.count("/") != 1 or name.startswith((".", "~"))
        short = re.split(r"[/\\]", name)[-1] if is_path else name
        return f"{short} ({self.split})" if self.split else short


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Part of the training rows that is evaluated instead of trained."""

    share: float | None = None
    """Share of the rows; None: a number of them."""
    most: int | None = None
    """Maximum number of rows, or the number if there is no share."""
    is_auto: bool = False

    def count(self, num_rows: int) -> int:
        """Return the number of rows to hold out.

        >>> [HeldOut(0.02, 200, True).count(n) for n in (3, 100, 100_000)], HeldOut(0.05).count(3)
        ([0, 2, 200], 1)
        """
        if self.share is None:
            return self.most or 0
        # Rounded first: 0.29 of 100 is 28.999999999999996 in floating point.
        found = math.floor(round(self.share * num_rows, 6))
        found = found if self.most is None else min(found, self.most)
        return found if self.is_auto else max(1, found)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def parse_held_out(text: str | None) -> HeldOut | None:
    """Return the held-out part that `data.eval` asks for; None: it names data, or nothing.

    Raises:
        ValueError: it is a number that is neither a share nor a count.

    >>> parse_held_out("auto"), parse_held_out("0.05"), parse_held_out("test.jsonl")
    (HeldOut(share=0.02, most=200, is_auto=True), HeldOut(share=0.05, most=None, is_auto=False), \
None)
    """
    text = (text or "").strip()
    if text == "auto":
        return HeldOut(0.02, 200, True)
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    if 0 < value < 1:
        return HeldOut(value)
    if value < 1 or not value.is_integer() or value > 10**9:
        raise ValueError(
            f"eval is {text}; it must be a share between 0 and 1, a whole number of rows, auto, "
            "or a file"
        )
    return HeldOut(None, int(value))


# ------------------------------------------------------------------- columns

WANTED = (
    "messages", "instruction", "input", "output", "system", "text", "tools",
    "chosen", "rejected",
)  # fmt: skip
"""Names to which a column can be mapped."""
RATED = ("candidates", "score", "rank", "best", "good")
"""The same, for columns that rate answers: of several candidates, the best and the worst become a
pair; of rows with a verdict, only the good ones are kept."""
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
        elif wanted in (*WANTED, *RATED):
            found.columns[name] = wanted
        else:
            known = ", ".join((*WANTED, *RATED, *(f"{_ROLE_PREFIX}{role}" for role in _ROLES)))
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

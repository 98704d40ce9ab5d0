"""Count and describe what the rows of a data set mean beyond the trained text.

The master counts the rows that it can read before it sends them, a node the rows that it trains on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agents.contract.data import DataFinding
from agents.shared.data.columns import (
    CALL_KEYS,
    CONVERSATION_KEYS,
    KNOWN_KEYS,
    QUESTION_KEYS,
    TOOL_KEYS,
    TURN_KEYS,
    used_columns,
)
from agents.shared.data.meaning import (
    CHOICES,
    KIND,
    Consequence,
    find_kind,
    find_marker,
    is_empty,
    judge_column,
    judge_key,
    judge_verdict,
    says_no,
)
from agents.shared.data.rendered import find_control

MAX_COLUMNS = 200
"""Maximum number of counted columns, since a foreign file may have new ones in each row."""
MIN_CUT_SHARE = 0.01
"""Share of cut tokens above which a run warns."""
_ORDER = ("refuse", "warn", "note")
MESSAGES = "messages[]."
"""Prefix of the name of a message's key."""
_READ_KEYS = TURN_KEYS | CALL_KEYS | TOOL_KEYS | {"tool_call_id"}
"""Keys of messages that are read, or that refer to a call."""
_NO_MESSAGES = frozenset({"system", "input", *TOOL_KEYS})
_SAID_NAME_CHARS = 60
_LISTED = 12


@dataclass(slots=True)
class _Seen:
    """Counts of one column with one meaning."""

    consequence: Consequence
    count: int = 0
    row: int | None = None
    """Number of the first affected row over all files."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """Number of values of each verdict, for a column of verdicts or ratings."""
    has_false: bool = False
    """True if a value is an explicit verdict, which cannot be a value on a scale."""
    is_noted: bool = False
    """True if a rating is only listed."""


class RowMeanings:
    """Counts the unused columns of rows by their meaning.

    Args:
        ignored: Columns that the user excluded (`data.ignore_columns`).
        beyond: Tokens for which the model has no weights.
    """

    def __init__(self, ignored: Sequence[str] = (), beyond: Sequence[str] = ()) -> None:
        self.num_rows = 0
        self._beyond = re.compile("|".join(map(re.escape, beyond))) if beyond else None
        self._ignored = frozenset(ignored)
        self._seen: dict[tuple[str, str], _Seen] = {}

    def add(self, row: dict[str, Any], data_format: str, place: int) -> None:
        """Count one row of a file; `place` is its number over all files."""
        self.num_rows += 1
        used = used_columns(row.keys() - self._ignored, data_format)
        keys: dict[tuple[str, str], Consequence] = {}
        for name, value in row.items():
            if name in used:
                if data_format != "text" and name in TOOL_KEYS and not is_empty(value):
                    self._count("tooled", name, _NOTE, place)
                if data_format != "text" and name not in _NO_MESSAGES:
                    self._judge_messages(value, keys, data_format)
            elif isinstance(name, str) and not is_empty(value):
                self._add_column(name, value, data_format, row, used, place)
        for (kind, key), consequence in keys.items():
            self._count(kind, f"{MESSAGES}{key}", consequence, place)
        if "system" in used and _has_other_system(row, used):
            self._count("other_system", "system", _WARN, place)
        # A pair that its own scores contradict was likely swapped.
        if data_format == "preference":
            self._add_reversed(row, place)
        self._judge_texts(list(_texts_of(row, used)), data_format, place)

    def _judge_texts(self, texts: Sequence[str], data_format: str, place: int) -> None:
        """Add the tokens and markers in the texts of a row."""
        control = next(filter(None, map(find_control, texts)), "")
        if control:
            self._count("rendered", control, "note" if data_format == "text" else "warn", place)
        if self._beyond is not None:
            found = next(filter(None, map(self._beyond.search, texts)), None)
            if found is not None:
                self._count("beyond", found.group(), "refuse", place)
        marker = next(filter(None, map(find_marker, texts)), "")
        if marker:
            self._count("placeholder", marker, "warn", place)

    def _add_reversed(self, row: dict[str, Any], place: int) -> None:
        for name, value in row.items():
            other = row.get(name.replace("chosen", "rejected")) if "chosen" in name else None
            both = isinstance(value, (int, float)) and isinstance(other, (int, float))
            if both and name not in self._ignored and value < other:
                self._count("reversed", name, "warn", place)

    def _add_column(
        self,
        name: str,
        value: Any,
        data_format: str,
        row: dict[str, Any],
        used: frozenset[str],
        place: int,
    ) -> None:
        if name in self._ignored:
            kind, consequence = "ignored", _NOTE
        elif name in KNOWN_KEYS and name != "system":
            kind, consequence = _judge_known(name, value, data_format, row, used)
        else:
            kind, consequence = judge_column(name, value, data_format)
            if kind in ("answer", "better") and _is_again(name, value, row, used):
                kind, consequence = "unknown", _NOTE
        is_rated = kind == "score" or (kind == "verdict" and find_kind(name).kind == kind)
        if kind == "score":  # judged by all values later: a `false` is a verdict
            consequence = "refuse" if data_format in KIND["verdict"].refused_in else "warn"
        seen = self._count(kind, name, consequence, None if is_rated else place)
        if seen is not None and is_rated:
            _add_verdict(seen, kind, name, value, place)
            seen.is_noted = data_format in ("text", "preference")

    def _judge_messages(
        self, value: Any, keys: dict[tuple[str, str], Consequence], data_format: str
    ) -> None:
        """Add the unread keys of messages, each with its gravest consequence."""
        for message in _messages_in(value):
            if not isinstance(message, dict):
                continue
            judged = [("skipped", key, _WARN) for key in _find_skipping(message)]
            called = (key for key in CALL_KEYS & message.keys() if not is_empty(message[key]))
            judged += [("tooled", key, _NOTE) for key in called]
            judged += _judge_keys(message, is_answer=_answers(message))
            content = message.get("content")
            for inner in content if isinstance(content, list) else ():
                if isinstance(inner, dict):
                    found = _judge_keys(inner, is_answer=_answers(message))
                    judged += [one for one in found if one[0] in _MARKS]
            if message.get("train_detail"):
                judged.append(("masked", "train_detail", _NOTE))
            for kind, key, consequence in judged:
                if key in self._ignored:
                    kind, consequence = "ignored", _NOTE
                elif kind == "weighted" and data_format == "preference" and _answers(message):
                    kind, consequence = "weight", "refuse"
                keys[kind, key] = _graver(consequence, keys.get((kind, key), _NOTE))

    def _count(
        self, kind: str, column: str, consequence: Consequence, place: int | None
    ) -> _Seen | None:
        seen = self._seen.get((kind, column))
        if seen is None:
            # Columns that are only listed must not displace meaningful ones.
            if len(self._seen) >= (MAX_COLUMNS if consequence == "note" else 2 * MAX_COLUMNS):
                return None
            seen = self._seen[kind, column] = _Seen(consequence)
        seen.count += 1
        seen.row = place if seen.row is None else seen.row
        # The gravest of all rows counts, since one may hold a picture and others its size.
        seen.consequence = _graver(consequence, seen.consequence)
        return seen

    def add_columns(self, kind: str, column: str, count: int, *, refused: bool) -> None:
        """Count a column whose values were not read, such as pictures of a table."""
        consequence: Consequence = "refuse" if refused else "note"
        if column in self._ignored:
            kind, consequence = "ignored", "note"
        seen = self._count(kind, column, consequence, None)
        if seen is not None:
            seen.count += count - 1

    def find(self) -> tuple[DataFinding, ...]:
        """Return the present findings, the gravest first."""
        found = [self._finding(*key, seen) for key, seen in self._seen.items()]
        # The same column may have meaningless values in other rows.
        known = {finding.column for finding in found if finding.kind != "unknown"}
        return sort_findings(
            finding for finding in found if finding.kind != "unknown" or finding.column not in known
        )

    @property
    def is_settled(self) -> bool:
        """Return whether data is refused regardless of later rows: a 0 may be one class of many."""
        return any(
            finding.consequence == "refuse"
            and (
                finding.kind != "verdict"
                or (seen := self._seen.get((finding.kind, finding.column))) is None
                or seen.has_false
            )
            for finding in self.find()
        )

    def _finding(self, kind: str, column: str, seen: _Seen) -> DataFinding:
        count, consequence = seen.count, seen.consequence
        if seen.verdicts:
            kind, consequence = _judge_counts(kind, seen)
            count = seen.verdicts["bad"] if kind == "verdict" else count
        return DataFinding(
            kind=kind,
            column=column,
            count=count,
            total=max(self.num_rows, count),
            consequence=consequence,
            row=seen.row,
        )


_NOTE: Consequence = "note"
_MARKS = ("weight", "masked", "weighted")
"""Kinds of the marks that a part of a message may have."""
_WARN: Consequence = "warn"


def _graver(one: Consequence, other: Consequence) -> Consequence:
    return min(one, other, key=_ORDER.index)


def _add_verdict(seen: _Seen, kind: str, name: str, value: Any, place: int) -> None:
    judged: str = judge_verdict(name, value)
    if kind == "score" and isinstance(value, (int, float)) and not isinstance(value, bool):
        judged = "other"  # in a rating, 0 and 1 are points on an unknown scale
    seen.verdicts[judged] += 1
    is_false = value is False or (isinstance(value, list) and False in value)
    seen.has_false |= is_false and judged == "bad"
    seen.has_false |= kind == "score" and says_no(value)
    if judged == "bad" and seen.row is None:
        seen.row = place


def _judge_counts(kind: str, seen: _Seen) -> tuple[str, Consequence]:
    """Return meaning and consequence of a column of verdicts or ratings, given all its values."""
    # With values other than yes and no, 0 is a point on a scale or one of many classes.
    said = seen.verdicts
    is_scale = kind == "score" or said["other"] > 0
    if said["bad"] and (seen.has_false or not is_scale):
        return "verdict", seen.consequence
    if said["bad"] or said["mixed"] or (kind == "score" and said["other"]):
        return "score", "note" if seen.is_noted else "warn"
    return "unknown", "note"


def _judge_known(
    name: str, value: Any, data_format: str, row: dict[str, Any], used: frozenset[str]
) -> tuple[str, Consequence]:
    """Return kind and consequence of a column that is read in rows of other formats."""
    is_number = isinstance(value, (int, float)) and name in QUESTION_KEYS  # its position in a list
    if is_number or _is_again(name, value, row, used):
        return "unknown", "note"
    kind = KIND["question" if name in QUESTION_KEYS or name == "input" else "answer"]
    return kind.kind, "refuse" if data_format in kind.refused_in else kind.otherwise


def _is_again(name: str, value: Any, row: dict[str, Any], used: frozenset[str]) -> bool:
    """Return whether a column repeats texts that are read."""
    # UltraChat's prompt repeats the first message, and Alpaca's prompt holds its instruction.
    texts = list(_texts_of(row, used))
    mine = [text.strip() for text in _texts_of({name: value}, (name,)) if text.strip()]
    asked = list(_texts_of(row, used & {*QUESTION_KEYS, *CONVERSATION_KEYS}))[:1]
    return bool(mine) and (
        all(any(part in text for text in texts) for part in mine)
        or any(text.strip() and text.strip() in part for text in asked for part in mine)
    )


def _find_skipping(message: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that make `agents.trainer.data.conversations` skip the row."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and not isinstance(part.get("text"), str):
            yield f"content[].{str(part.get('type', 'part'))[:40]}"


def _judge_keys(message: dict[str, Any], *, is_answer: bool) -> list[tuple[str, str, Consequence]]:
    """Return kind, name and consequence of each unread key of a message, or of one of its parts."""
    found = []
    for key, part in message.items():
        if key not in _READ_KEYS and not is_empty(part):
            kind, consequence = judge_key(str(key), part, is_answer=is_answer)
            found.append((kind, str(key), consequence))
    return found


def _answers(message: dict[str, Any]) -> bool:
    return (message.get("role") or message.get("from")) in ("assistant", "gpt", "bot", "model")


def _messages_in(value: Any) -> Sequence[Any]:
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):  # in a CSV file
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    return value if isinstance(value, list) else (value,)


def _has_other_system(row: dict[str, Any], used: Iterable[str]) -> bool:
    """Return whether the messages of a row begin with another system prompt than its own."""
    given = row["system"]
    if not isinstance(given, str) or not given.strip():
        return False
    for name in used:
        first = next(iter(_messages_in(row[name])), None) if name not in _NO_MESSAGES else None
        if isinstance(first, dict):
            role = str(first.get("role") or first.get("from")).lower()
            said = first.get("content") or first.get("value")
            if role in ("system", "developer") and isinstance(said, str):
                return said.strip() != given.strip()
    return False


def _texts_of(row: dict[str, Any], used: Iterable[str]) -> Iterator[str]:
    """Yield the texts of the used columns."""
    for name in used:
        value = row.get(name)
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict):
                inner = (part.get("content"), part.get("value"))
                yield from (text for text in inner if isinstance(text, str))


def sort_findings(found: Iterable[DataFinding]) -> tuple[DataFinding, ...]:
    """Return findings sorted by gravity, then by share."""
    return tuple(
        sorted(found, key=lambda one: (_ORDER.index(one.consequence), -one.share, one.column))
    )


def describe_cut(
    num_tokens: int, num_cut: int, file: str = "", file_share: float | None = None
) -> tuple[DataFinding, ...]:
    """Return the finding about tokens beyond `sequence_tokens`; empty: nothing was cut."""
    if not num_cut:
        return ()
    grave = num_cut > MIN_CUT_SHARE * num_tokens
    return (
        DataFinding(
            kind="cut",
            column="",
            count=num_cut,
            total=num_tokens,
            consequence="warn" if grave else "note",
            file=file,
            file_share=file_share,
        ),
    )


def describe_reading(reading: str, num_rows: int) -> tuple[DataFinding, ...]:
    """Return the finding about how rows are read; empty: their format is set."""
    count = max(1, num_rows)
    found = DataFinding(
        kind="recognized", column=reading, count=count, total=count, consequence="note"
    )
    return (found,) if reading else ()


def say_finding(found: DataFinding) -> str:
    """Return a finding as a sentence without its full stop.

    >>> say_finding(DataFinding(kind="verdict", column="label", count=5, total=10,
    ...     consequence="refuse", row=2))
    "in 5 of 10 rows (50 %), the first of them row 2, 'label' calls rows bad examples, and they \
would be learned as good ones"
    >>> say_finding(describe_cut(1000, 770)[0])
    '77 % of the tokens (770 of 1,000) are behind sequence_tokens and are cut'
    """
    if found.source:
        return f"{found.source}: {say_finding(replace(found, source=''))}"
    count, total, share = f"{found.count:,}", f"{found.total:,}", show_share(found)
    if found.kind == "cut":
        worst = ""
        if found.file and found.file_share is not None:
            worst = f"; of {found.file} {found.file_share * 100:.0f} %"
        return (
            f"{share} of the tokens ({count} of {total}) are behind sequence_tokens and are "
            f"cut{worst}"
        )
    if found.kind == "recognized":
        return found.column
    if found.kind == "documents":
        unit = {"file": "a whole text file", "blank-line": "a paragraph", "line": "a line"}
        each = unit.get(found.column, "a text")
        return f"{count} documents, each of them {each} (data.documents)"
    kind = KIND.get(found.kind, KIND["unknown"])
    first = ""
    if found.row is not None and found.consequence != "note":
        where = f"{found.file}, row {found.row}" if found.file else f"row {found.row}"
        first = f", the first of them {where}," if found.count > 1 else f", {where},"
    rows = "row" if found.total == 1 else "rows"
    return f"in {count} of {total} {rows} ({share}){first} {show_name(found.column)} {kind.says}"


def hint_for(found: DataFinding) -> str:
    """Return the advice for a finding; empty: nothing needs to be done."""
    kind = KIND.get(found.kind, KIND["unknown"])
    if found.kind == "context" and found.column in CHOICES:
        name = found.column
        return (
            f"Set data.columns: [input={name}, output={name}.answer], if 'answer' says which is "
            f"right, or set data.ignore_columns: [{name}] to train on them anyway"
        )
    return kind.hint.format(column=found.column.removeprefix(MESSAGES))


def show_share(found: DataFinding) -> str:
    """Return the share in percent, never rounded to 0 or 100."""
    percent = found.share * 100
    if 0 < percent < 1:
        return "less than 1 %"
    if 99 < percent < 100:
        return "more than 99 %"
    return f"{percent:.0f} %"


def list_columns(found: Sequence[DataFinding]) -> str:
    """Return columns with their shares, shortened if there are many.

    >>> list_columns([DataFinding(kind="unknown", column="id", count=9, total=9,
    ...     consequence="note")])
    "'id' (100 %)"
    """
    said = [
        f"{show_name(one.column)} ({show_share(one)}{' of ' if one.source else ''}{one.source})"
        for one in found[:_LISTED]
    ]
    more = len(found) - _LISTED
    return ", ".join([*said, f"and {more} more"] if more > 0 else said)


def show_name(column: str) -> str:
    """Return a column's name in quotes, cut to a readable length."""
    return repr(column if len(column) <= _SAID_NAME_CHARS else f"{column[:_SAID_NAME_CHARS]}...")


def refusals(found: Iterable[DataFinding]) -> tuple[DataFinding, ...]:
    """Return the findings that make a run refuse its data."""
    return tuple(one for one in found if one.consequence == "refuse")


def say_refusal(name: str, refused: Sequence[DataFinding]) -> tuple[str, str]:
    """Return message and hint for refused data; neither ends with a full stop."""
    first, *others = refused
    also = (
        f"; it also has {', '.join(show_name(one.column) for one in others[:_LISTED])}"
        if others
        else ""
    )
    return f"{name}: {say_finding(first)}{also}", hint_for(first)


def place_finding(found: DataFinding, row: int | None, file: str) -> DataFinding:
    """Return a finding with the number of its first row within that row's file."""
    return replace(found, row=row, file=file or found.file)

"""Count what the rows of a data set mean beyond what is trained, and say it.

The master counts the rows it can read before it sends them, a node those that it trains on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    KIND,
    ColumnKind,
    Consequence,
    find_kind,
    find_marker,
    holds_media,
    is_empty,
    is_held_out,
    is_history,
    is_listed_tools,
    is_media,
    is_rating,
    is_reasoning,
    is_role,
    is_system_prompt,
    is_weighted,
    judge_media,
    judge_verdict,
    says_no,
)

MAX_COLUMNS = 200
"""Maximum number of columns that are counted; rows of strangers may invent new ones for ever."""
MIN_CUT_SHARE = 0.01
"""Share of cut tokens from which a run warns."""
_ORDER = ("refuse", "warn", "note")
MESSAGES = "messages[]."
"""What precedes the name of a message's key."""
_NO_MESSAGES = frozenset({"system", "input", *TOOL_KEYS})
_SAID_NAME_CHARS = 60
_LISTED = 12


@dataclass(slots=True)
class _Seen:
    """Counts of one column with one meaning."""

    count: int = 0
    row: int | None = None
    """Place of the first such row over all files."""
    consequence: Consequence = "note"
    num_bad: int = 0
    """Verdicts against an answer."""
    num_good: int = 0
    num_other: int = 0
    """Values of a verdict's column that are no verdict."""
    num_mixed: int = 0
    """Lists of verdicts of both kinds."""
    has_false: bool = False
    is_noted: bool = False
    """Whether a rating is merely listed."""


class RowMeanings:
    """Counts the columns of rows that are not used, by what they mean.

    Args:
        ignored: Columns that the run leaves out on purpose (`data.ignore_columns`).
    """

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self.num_rows = 0
        self._ignored = frozenset(ignored)
        self._seen: dict[tuple[str, str], _Seen] = {}

    def add(self, row: dict[str, Any], data_format: str, place: int) -> None:
        """Count one row, as the file has it; `place` is its number over all files."""
        self.num_rows += 1
        used = used_columns(row.keys() - self._ignored, data_format)
        said: set[tuple[str, str]] = set()
        for name, value in row.items():
            if name in used:
                if name in TOOL_KEYS and not is_empty(value):
                    self._count("skipped", name, "warn", place)
                if data_format != "text" and name not in _NO_MESSAGES:
                    self._look_into(value, place, said)
            elif isinstance(name, str) and not is_empty(value):
                self._add_column(name, value, data_format, row, used, place)
        if data_format == "preference":
            self._add_reversed(row, place)
        marker = next(filter(None, map(find_marker, _texts_of(row, used))), "")
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
            self._count("ignored", name, "note", place)
            return
        known = _meaning_of_known(name, value, row, used)
        if known is not None:
            self._count(known.kind, name, _consequence(known, data_format), place)
            return
        kind = find_kind(name)
        if kind.kind == "unknown" and isinstance(value, (int, float)):
            self._count("unknown", name, "note", place)
            return
        media = _judge_picture(name, value, kind, data_format)
        if media is not None:
            self._count("media", name, media, place)
        elif kind.kind == "verdict" or (kind.kind == "score" and is_rating(name, value)):
            self._add_verdict(name, value, kind, data_format, place)
        elif kind.kind == "unknown" and data_format != "text" and says_no(value):
            self._count("verdict", name, "warn", place)
        elif _holds_meaning(kind, name, value, data_format):
            self._count(kind.kind, name, _consequence(kind, data_format), place)
        else:
            self._count("unknown", name, "note", place)

    def _add_verdict(
        self, name: str, value: Any, kind: ColumnKind, data_format: str, place: int
    ) -> None:
        judged = judge_verdict(name, value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind.kind == "score" and is_number:
            judged = "other"  # of a rating, 0 and 1 are places on an unknown scale
        verdict = KIND["verdict"]
        seen = self._count(kind.kind, name, _consequence(verdict, data_format), place, first=False)
        if seen is None:
            return
        seen.is_noted = data_format in KIND["score"].noted_in
        seen.num_bad += judged == "bad"
        seen.num_good += judged == "good"
        seen.num_other += judged == "other"
        seen.num_mixed += judged == "mixed"
        is_false = value is False or (isinstance(value, list) and False in value)
        seen.has_false |= is_false and judged == "bad"
        seen.has_false |= kind.kind == "score" and says_no(value)
        if judged == "bad" and seen.row is None:
            seen.row = place

    def _look_into(self, value: Any, place: int, said: set[tuple[str, str]]) -> None:
        """Count the keys of messages that are not read; each once per row."""
        for message in _messages_in(value):
            if not isinstance(message, dict):
                continue
            for key in _find_skipping(message):
                self._say("skipped", key, "warn", place, said)
            if not (message.keys() - TURN_KEYS):
                continue
            for key, part in message.items():
                if key in TURN_KEYS or key in CALL_KEYS or is_empty(part):
                    continue
                self._say(*_judge_key(str(key), part, message), place, said)

    def _say(
        self, kind: str, key: str, consequence: Consequence, place: int, said: set[tuple[str, str]]
    ) -> None:
        """Count a key of a message, once per row."""
        if key in self._ignored:
            kind, consequence = "ignored", "note"
        if (kind, key) not in said:
            said.add((kind, key))
            self._count(kind, f"{MESSAGES}{key}", consequence, place)

    def _count(
        self, kind: str, column: str, consequence: Consequence, place: int, *, first: bool = True
    ) -> _Seen | None:
        seen = self._seen.get((kind, column))
        if seen is None:
            # Columns that merely are there must not keep out those that mean something.
            if len(self._seen) >= (MAX_COLUMNS if consequence == "note" else 2 * MAX_COLUMNS):
                return None
            seen = self._seen[kind, column] = _Seen(consequence=consequence)
        seen.count += 1
        if first and seen.row is None:
            seen.row = place
        # The gravest of all rows counts: one of them may hold a picture, others its size.
        if _ORDER.index(consequence) < _ORDER.index(seen.consequence):
            seen.consequence = consequence
        return seen

    def add_columns(self, kind: str, column: str, count: int, *, refused: bool) -> None:
        """Count a column whose values were not read, such as pictures of a table."""
        consequence: Consequence = "refuse" if refused else "note"
        if column in self._ignored:
            kind, consequence = "ignored", "note"
        seen = self._count(kind, column, consequence, 0, first=False)
        if seen is not None:
            seen.count += count - 1

    def find(self) -> tuple[DataFinding, ...]:
        """Return what was found so far, the gravest first."""
        found = [self._finding(*key, seen) for key, seen in self._seen.items()]
        # Other rows may have the same column with a value that means nothing.
        known = {one.column for one in found if one.kind != "unknown"}
        return sort_findings(
            one for one in found if one.kind != "unknown" or one.column not in known
        )

    @property
    def is_settled(self) -> bool:
        """Whether data is refused whatever follows: a 0 may turn out to be one class of many."""
        return any(
            one.consequence == "refuse"
            and (
                one.kind != "verdict"
                or (seen := self._seen.get((one.kind, one.column))) is None
                or seen.has_false
            )
            for one in self.find()
        )

    def _finding(self, kind: str, column: str, seen: _Seen) -> DataFinding:
        count, consequence = seen.count, seen.consequence
        is_counted = kind in ("verdict", "score") and (
            seen.num_bad + seen.num_other + seen.num_good + seen.num_mixed
        )
        if is_counted:
            kind, consequence = _judge_counts(kind, seen)
            count = seen.num_bad if kind == "verdict" else count
        return DataFinding(
            kind=kind,
            column=column,
            count=count,
            total=max(self.num_rows, count),
            consequence=consequence,
            row=seen.row,
        )


def _judge_counts(kind: str, seen: _Seen) -> tuple[str, Consequence]:
    """Return meaning and consequence of a column of verdicts or ratings, by all of its values."""
    # With other values beside yes and no, 0 is a place on a scale or one of many classes.
    is_scale = kind == "score" or seen.num_other > 0
    if seen.num_bad and (seen.has_false or not is_scale):
        return "verdict", seen.consequence
    is_rated = kind == "score" and seen.num_other > 0
    if is_rated or seen.num_bad or seen.num_mixed:
        return "score", "note" if seen.is_noted else "warn"
    return "unknown", "note"


def _consequence(kind: ColumnKind, data_format: str) -> Consequence:
    return "refuse" if data_format in kind.refused_in else kind.otherwise


def _holds_meaning(kind: ColumnKind, name: str, value: Any, data_format: str) -> bool:
    """Return whether the value bears out what the name says."""
    if kind.kind == "weight":
        return is_weighted(name, value)
    if kind.kind == "history":
        return is_history(name, value)
    if kind.kind == "system":
        return is_system_prompt(name)
    if kind.kind == "tools":
        return is_listed_tools(value)
    if kind.kind == "split":
        return is_held_out(value)
    if kind.kind == "reasoning":
        return is_reasoning(name, value)
    if kind.kind == "turn":
        return data_format != "text" or is_role(value)
    return kind.kind not in ("media", "score")


def _judge_picture(name: str, value: Any, kind: ColumnKind, data_format: str) -> Consequence | None:
    """Return the consequence of a column of pictures, sound or video; None: it is none."""
    media = judge_media(name, value)
    if media is None or data_format in kind.refused_in:
        return media
    if data_format != "text" or holds_media(value):
        return media if is_media(value) else "warn"
    # A text stands for itself, whatever page or recording it comes from.
    return "warn" if kind.kind == "media" else None


def _meaning_of_known(
    name: str, value: Any, row: dict[str, Any], used: frozenset[str]
) -> ColumnKind | None:
    """Return what a column means that other formats read; None: it is none of these."""
    if name not in KNOWN_KEYS or name == "system":
        return None
    # UltraChat's prompt is the first message once more, and Alpaca's prompt holds its instruction.
    texts = list(_texts_of(row, used))
    mine = [text.strip() for text in _texts_of({name: value}, (name,)) if text.strip()]
    asked = list(_texts_of(row, used & {*QUESTION_KEYS, *CONVERSATION_KEYS}))[:1]
    is_again = all(any(one in text for text in texts) for one in mine) or any(
        text.strip() and text.strip() in one for text in asked for one in mine
    )
    if mine and is_again:
        return KIND["unknown"]
    return KIND["question" if name in QUESTION_KEYS or name == "input" else "answer"]


def _find_skipping(message: dict[str, Any]) -> Iterator[str]:
    """Yield the keys for which a row is left out, as `agents.trainer.data.conversations` does."""
    for key in CALL_KEYS & message.keys():
        if not is_empty(message[key]):
            yield key
    if message.get("weight") not in (None, 1) and _answers(message):
        yield "weight"
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and not isinstance(part.get("text"), str):
            yield f"content[].{str(part.get('type', 'part'))[:40]}"


def _answers(message: dict[str, Any]) -> bool:
    return (message.get("role") or message.get("from")) in ("assistant", "gpt", "bot", "model")


def _judge_key(key: str, part: Any, message: dict[str, Any]) -> tuple[str, str, Consequence]:
    """Return what a message's key means, as long as no chat template has had a look at it."""
    kind, consequence = _judge_value(key, part, message)
    return kind, key, consequence


def _judge_value(key: str, part: Any, message: dict[str, Any]) -> tuple[str, Consequence]:
    media = judge_media(key, part)
    if media is not None:
        return "media", media
    kind = find_kind(key)
    if kind.kind == "weight" and is_weighted(key, part):
        return "weight", "refuse" if _answers(message) else "note"
    if kind.kind in ("verdict", "score"):
        return _judge_rated(kind, key, part, message)
    if kind.kind == "reasoning" and is_reasoning(key, part):
        return "reasoning", "warn"
    return "unknown", "note"


def _judge_rated(
    kind: ColumnKind, key: str, part: Any, message: dict[str, Any]
) -> tuple[str, Consequence]:
    """Return what a verdict or rating beside a message means."""
    is_number = isinstance(part, (int, float)) and not isinstance(part, bool)
    bad = judge_verdict(key, part) == "bad" and not is_number
    if bad and (kind.kind == "verdict" or part is False or says_no(part)):
        # A question may be a bad one: it is not learned.
        return "verdict", "refuse" if isinstance(part, bool) or _answers(message) else "note"
    is_rated = is_rating(key, part) and (is_number or kind.kind == "score")
    return ("score", "warn") if is_rated and _answers(message) else ("unknown", "note")


def _messages_in(value: Any) -> Sequence[Any]:
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):  # in a CSV file
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    return value if isinstance(value, list) else (value,)


def _texts_of(row: dict[str, Any], used: Iterable[str]) -> Iterator[str]:
    """Yield the texts of the columns that are used."""
    for name in used:
        value = row.get(name)
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, str):
                yield one
            elif isinstance(one, dict):
                yield from (
                    part for part in (one.get("content"), one.get("value")) if isinstance(part, str)
                )


def sort_findings(found: Iterable[DataFinding]) -> tuple[DataFinding, ...]:
    """Return findings with the gravest first, then by their share."""
    return tuple(
        sorted(found, key=lambda one: (_ORDER.index(one.consequence), -one.share, one.column))
    )


def describe_cut(
    num_tokens: int, num_cut: int, file: str = "", file_share: float | None = None
) -> tuple[DataFinding, ...]:
    """Return the finding of tokens behind `sequence_tokens`; none: nothing was cut."""
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


def say_finding(found: DataFinding) -> str:
    """Return a finding as a sentence without its full stop.

    >>> say_finding(DataFinding(kind="verdict", column="label", count=5, total=10,
    ...     consequence="refuse", row=2))
    "in 5 of 10 rows (50 %), the first of them row 2, 'label' calls rows bad examples, and they \
would be learned as good ones"
    >>> say_finding(describe_cut(1000, 770)[0])
    '77 % of the tokens (770 of 1,000) are behind sequence_tokens and are cut'
    """
    count, total, share = f"{found.count:,}", f"{found.total:,}", show_share(found)
    if found.kind == "cut":
        worst = ""
        if found.file and found.file_share is not None:
            worst = f"; of {found.file} {found.file_share * 100:.0f} %"
        return (
            f"{share} of the tokens ({count} of {total}) are behind sequence_tokens and are "
            f"cut{worst}"
        )
    kind = KIND.get(found.kind, KIND["unknown"])
    first = ""
    if found.row is not None and found.consequence != "note":
        where = f"{found.file}, row {found.row}" if found.file else f"row {found.row}"
        first = f", the first of them {where}," if found.count > 1 else f", {where},"
    rows = "row" if found.total == 1 else "rows"
    return f"in {count} of {total} {rows} ({share}){first} {show_name(found.column)} {kind.says}"


def hint_for(found: DataFinding) -> str:
    """Return what to do about a finding; empty: nothing has to be done."""
    kind = KIND.get(found.kind, KIND["unknown"])
    return kind.hint.format(column=found.column.removeprefix(MESSAGES))


def show_share(found: DataFinding) -> str:
    """Return the share in percent, never rounded to none or all of it."""
    percent = found.share * 100
    if 0 < percent < 1:
        return "less than 1 %"
    if 99 < percent < 100:
        return "more than 99 %"
    return f"{percent:.0f} %"


def list_columns(found: Sequence[DataFinding]) -> str:
    """Return columns with their shares, the first of them if there are many.

    >>> list_columns([DataFinding(kind="unknown", column="id", count=9, total=9,
    ...     consequence="note")])
    "'id' (100 %)"
    """
    said = [f"{show_name(one.column)} ({show_share(one)})" for one in found[:_LISTED]]
    more = len(found) - _LISTED
    return ", ".join([*said, f"and {more} more"] if more > 0 else said)


def show_name(column: str) -> str:
    """Return a column's name in quotes, cut to a readable length."""
    return repr(column if len(column) <= _SAID_NAME_CHARS else f"{column[:_SAID_NAME_CHARS]}...")


def refusals(found: Iterable[DataFinding]) -> tuple[DataFinding, ...]:
    """Return the findings for which a run refuses its data."""
    return tuple(one for one in found if one.consequence == "refuse")


def say_refusal(name: str, refused: Sequence[DataFinding]) -> tuple[str, str]:
    """Return message and hint for data that is refused; neither ends with a full stop."""
    first, *others = refused
    also = (
        f"; it also has {', '.join(show_name(one.column) for one in others[:_LISTED])}"
        if others
        else ""
    )
    return f"{name}: {say_finding(first)}{also}", hint_for(first)


def place_finding(found: DataFinding, row: int | None, file: str) -> DataFinding:
    """Return a finding with the number of its first row within the file of that row."""
    return replace(found, row=row, file=file or found.file)

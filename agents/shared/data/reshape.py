"""Give a row the columns that the formats read: by `data.columns`, or by the shape of its values.

Recognized without a mapping, because the values leave no doubt:

- one column of messages (`role` or `from`, with a text) under any name
- a conversation of question and answer objects, in a column that is named as one
- other names of the two answers of a pair, and pairs written as a transcript
- `input` and `history` of a pair, as LLaMA-Factory writes them

Everything else is offered as a mapping, and read only once the user has set it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.contract.data import parse_columns
from agents.shared.data.columns import (
    ANSWER_KEYS,
    CONVERSATION_KEYS,
    QUESTION_KEYS,
    find_rows_inside,
    first_of,
)

_SIDES = (
    ("chosen_response", "rejected_response"),
    ("accepted", "rejected"),
    ("preferred", "dispreferred"),
    ("winner", "loser"),
)
_CONVERSATIONS = (
    *("conversation", "conversations", "messages", "turns", "dialog", "dialogue", "dialogs"),
    *("dialogues", "chat", "chats", "thread"),
)
_TURN_QUESTIONS = (*QUESTION_KEYS, "input", "user", "human", "query", "q")
_TURN_ANSWERS = (*ANSWER_KEYS, "assistant", "bot", "gpt", "reply", "a")
# How Anthropic's preference data writes a conversation.
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
_OFFERED = {
    "messages": ("conversation", "dialog", "dialogue", "dialogs", "data", "turns", "chat", "items"),
    "instruction": (
        *QUESTION_KEYS, "input", "query", "user", "human", "source", "article", "document",
        "message_1", "problem", "src", "en",
    ),
    "output": (
        *ANSWER_KEYS, "target", "assistant", "bot", "summary", "highlights", "message_2",
        "solution", "label_text", "answers", "reply", "tgt", "de", "fr", "es", "zh",
    ),
    "text": ("content", "document", "body", "article", "markdown", "code", "page_content", "raw"),
    "chosen": ("better", "best", "good", "positive", "response_a", "chosen_answer"),
    "rejected": ("worse", "worst", "bad", "negative", "response_b", "rejected_answer"),
    "system": ("system_prompt", "systemprompt", "sys"),
}  # fmt: skip
"""Usual other names of each column, for offers."""


class ColumnMapping:
    """The mapping that `data.columns` asks for; without entries, what the values show.

    Raises:
        ValueError: an entry is invalid, see `agents.contract.data`.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        names = parse_columns(entries)
        self.columns, self.roles = names.columns, names.roles

    def apply(self, row: Any) -> Any:
        """Return a row with the columns that the formats read; `row` itself is unchanged."""
        if isinstance(row, list) and self.columns:
            row = {str(place): value for place, value in enumerate(row)}
        if not isinstance(row, dict):
            return row
        shaped = self._rename(row) if self.columns else dict(row)
        _find_sides(shaped)
        self._find_messages(shaped)
        asked = first_of(shaped.keys(), QUESTION_KEYS)
        if "chosen" in shaped and "rejected" in shaped:
            _shape_pair(shaped, asked)
        elif asked and first_of(shaped.keys(), ANSWER_KEYS) and "history" in shaped:
            _join_question(shaped, asked)
        return shaped

    def _rename(self, row: dict[Any, Any]) -> dict[Any, Any]:
        found = {self.columns[name]: _find(row, name) for name in self.columns}
        kept = {key: value for key, value in row.items() if key not in self.columns}
        # A column that keeps its name but is not the wanted one would be read in its place.
        return {**kept, **{wanted: value for wanted, value in found.items() if value is not None}}

    def _find_messages(self, row: dict[Any, Any]) -> None:
        key = first_of(row.keys(), CONVERSATION_KEYS) or _find_conversation(row)
        if key is None:
            return
        turns = find_turns(row[key])
        shaped = _shape_turns(turns, is_mapped=key in self.columns.values())
        if shaped is not None or key not in CONVERSATION_KEYS:
            messages = shaped if shaped is not None else turns
            if key not in CONVERSATION_KEYS:
                del row[key]
                key = CONVERSATION_KEYS[0]
            row[key] = messages
        if self.roles and isinstance(row[key], (list, str)):
            row[key] = [self._with_role(message) for message in find_turns(row[key]) or ()]

    def _with_role(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        key = "role" if message.get("role") is not None else "from"
        role = message.get(key)
        known = self.roles.get(role) if isinstance(role, str) else None
        return {**message, key: known} if known else message


def _find(row: Mapping[Any, Any], name: str) -> Any:
    """Return the value of a column, or of a field in a column: `translation.en`, `answers.text`."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    # SQuAD writes the only answer as a list.
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else value


def _find_conversation(row: Mapping[Any, Any]) -> str | None:
    """Return the name of the only column that is a conversation without doubt, or None."""
    if {"text", "chosen", "rejected"} & row.keys() or (
        first_of(row.keys(), QUESTION_KEYS) and first_of(row.keys(), ANSWER_KEYS)
    ):
        return None  # another format, of which this column would be a part
    found = [
        name
        for name, value in row.items()
        if isinstance(name, str) and _is_conversation(name, find_turns(value))
    ]
    return found[0] if len(found) == 1 else None


def _is_conversation(name: str, turns: Any) -> bool:
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        return False
    if all(turn.keys() & {"role", "from"} and turn.keys() & {"content", "value"} for turn in turns):
        return True
    return name.lower() in _CONVERSATIONS and _shape_turns(turns, is_mapped=False) is not None


def _shape_turns(turns: Any, *, is_mapped: bool) -> list[dict[str, Any]] | None:
    """Return question and answer objects, or texts by turns, as messages; None: neither."""
    if not isinstance(turns, list) or not turns:
        return None
    if is_mapped and all(isinstance(turn, str) for turn in turns):
        roles = ("user", "assistant")
        return [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    messages = []
    for turn in turns:
        pair = _read_exchange(turn)
        if pair is None:
            return None
        messages += pair
    return messages


def _read_exchange(turn: Any) -> list[dict[str, Any]] | None:
    """Return the messages of one object with a question and its answer, or of a pair of texts."""
    if isinstance(turn, (list, tuple)) and len(turn) == 2:  # LLaMA-Factory's history
        texts = {"q": turn[0], "a": turn[1]}
        return _read_exchange(texts) if all(isinstance(text, str) for text in turn) else None
    if not isinstance(turn, dict) or turn.keys() & {"role", "from"}:
        return None
    keys = {str(key).lower(): key for key in turn}
    asked, answered = first_of(keys.keys(), _TURN_QUESTIONS), first_of(keys.keys(), _TURN_ANSWERS)
    if asked is None or answered is None:
        return None
    question = turn[keys[asked]]
    more = turn[keys["input"]] if "input" in keys and asked != "input" else None
    if isinstance(question, str) and isinstance(more, str) and more.strip():
        question = f"{question}\n\n{more}"
    read = (keys[asked], keys[answered], keys.get("input"))
    marks = {key: value for key, value in turn.items() if key not in read}
    answer = {**marks, "role": "assistant", "content": turn[keys[answered]]}
    return [{"role": "user", "content": question}, answer]


def _find_sides(row: dict[Any, Any]) -> None:
    for chosen, rejected in _SIDES:
        if chosen in row and rejected in row and "chosen" not in row:
            row["chosen"] = row.pop(chosen)
            row["rejected"] = row.pop(rejected)


def _shape_pair(row: dict[Any, Any], asked: str | None) -> None:
    """Join the parts of a pair's question; turn transcripts into messages."""
    if asked is not None:
        _join_question(row, asked)
        return
    sides = [_read_transcript(row[side]) for side in ("chosen", "rejected")]
    if all(sides):
        row["chosen"], row["rejected"] = sides
    turns = first_of(row.keys(), CONVERSATION_KEYS)
    if turns is not None and isinstance(find_turns(row[turns]), list):
        row["prompt"] = find_turns(row.pop(turns))  # ShareGPT pairs


def _join_question(row: dict[Any, Any], asked: str) -> None:
    """Append `input` to a question, and put the turns of `history` before it."""
    if not isinstance(row[asked], str):
        return
    if isinstance(row.get("input"), str):
        more = row.pop("input")
        row[asked] = f"{row[asked]}\n\n{more}" if more.strip() else row[asked]
    turns = find_turns(row.get("history"))
    before = _shape_turns(turns, is_mapped=False)
    # An empty history, too: rows of a file should have one format.
    if before or turns == []:
        row.pop("history")
        row[asked] = [*(before or ()), {"role": "user", "content": row[asked]}]


def _read_transcript(text: Any) -> list[dict[str, str]] | None:
    """Return the messages of a text such as `Human: Hi\\n\\nAssistant: Hello`, or None."""
    if not isinstance(text, str) or not (begin := _TRANSCRIPT.match(text)):
        return None
    if begin[1] != "Human":
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    _, *parts = _TRANSCRIPT.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[name], "content": said.strip()} for name, said in turns]


def offer_mapping(row: Any) -> str:
    """Return `data.columns` for a row that no format reads, ready to paste; empty: none is near.

    >>> offer_mapping({"INSTRUCTION": "q", "RESPONSE": "a"})
    'data.columns: [instruction=INSTRUCTION, output=RESPONSE]'
    >>> offer_mapping({"dialog": ["hi", "hello"]}), offer_mapping(["q", "a"])
    ('data.columns: [messages=dialog]', 'data.columns: [instruction=0, output=1]')
    """
    if isinstance(row, list) and len(row) > 1 and all(isinstance(text, str) for text in row[:2]):
        return "data.columns: [instruction=0, output=1]"
    if not isinstance(row, dict):
        return ""
    names = _names_inside(row)
    turns = [name for name, value in names.items() if _could_be_turns(value)]
    if len(turns) == 1:
        return f"data.columns: [messages={turns[0]}]"
    texts = {name: value for name, value in names.items() if _is_text(value)}
    found = {wanted: _nearest(texts, _OFFERED[wanted]) for wanted in _OFFERED}
    for needed in (("chosen", "rejected"), ("instruction", "output"), ("text",)):
        chosen = [found[wanted] for wanted in needed]
        if all(chosen) and len(set(chosen)) == len(chosen):
            extra = ("instruction", "system") if needed[0] == "chosen" else ("system",)
            wanted = [*needed, *(one for one in extra if found[one] and found[one] not in chosen)]
            return f"data.columns: [{', '.join(f'{one}={found[one]}' for one in wanted)}]"
    return ""


def _names_inside(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the columns of a row and the fields of its objects, by dotted name."""
    names: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            names |= {f"{key}.{inner}": part for inner, part in value.items()}
        names[str(key)] = value
    return names


def _could_be_turns(value: Any) -> bool:
    turns = find_turns(value)
    if not isinstance(turns, list) or len(turns) < 2:
        return False
    return all(isinstance(turn, str) for turn in turns) or (
        _shape_turns(turns, is_mapped=True) is not None
    )


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], str)
    return isinstance(value, str) and bool(value.strip())


def _nearest(names: Mapping[str, Any], usual: Sequence[str]) -> str:
    lowered = {name.lower().rpartition(".")[2]: name for name in names}
    return next((lowered[name] for name in usual if name in lowered), "")


def find_turns(value: Any) -> Any:
    """Return a list, or the list that a text of JSON holds, as tables write it; else None."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def unfold(rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield the numbered values of a file, or the rows inside of its only object.

    Only an object around the whole file is such a wrapper: `{"version": 1, "data": [{...}]}`. A
    list inside of a row belongs to that row.
    """
    first, second = next(rows, None), next(rows, None)
    if first is None:
        return
    is_wrapper = second is None and isinstance(first[1], dict) and not _find_conversation(first[1])
    inside = find_rows_inside(first[1]) if is_wrapper else None
    if inside is not None:
        yield from enumerate(inside, start=1)
        return
    yield first
    if second is not None:
        yield second
        yield from rows

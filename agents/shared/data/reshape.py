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

from agents.contract.data import RATED, parse_columns
from agents.shared.data.columns import (
    ANSWER_KEYS,
    CONVERSATION_KEYS,
    KNOWN_KEYS,
    QUESTION_KEYS,
    THOUGHT_KEYS,
    TOOL_KEYS,
    find_rows_inside,
    first_of,
    quote,
    used_columns,
)
from agents.shared.data.meaning import find_kind, is_about, judge_verdict, shape_of
from agents.shared.data.rankings import rank_answers

_SIDES = (
    ("chosen_response", "rejected_response"),
    ("accepted", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("preferred", "dispreferred"),
    ("winner", "loser"),
)
CONVERSATIONS = (
    *("conversation", "conversations", "messages", "turns", "dialog", "dialogue", "dialogs"),
    *("dialogues", "chat", "chats", "thread", "contents"),
)
_TURN_QUESTIONS = (*QUESTION_KEYS, "input", "user", "human", "query", "q")
_TURN_ANSWERS = (*ANSWER_KEYS, "assistant", "bot", "gpt", "reply", "a")
# How Anthropic's preference data writes a conversation.
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
_NEWER_ROLES = {"prompter": "user", "ai": "assistant", "chatbot": "assistant"}
KNOWN_ROLES = {"human": "user", **dict.fromkeys(("gpt", "bot", "model"), "assistant")}
KNOWN_ROLES |= _NEWER_ROLES
KNOWN_ROLES |= {"developer": "system", "function": "tool", "observation": "tool"}
KNOWN_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
"""Role of a message by its usual names, in small letters."""
_ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "type")
_SAID_KEYS = ("content", "value", "text", "message", "parts", "utterance")
_NOTHING = frozenset({"", "nan", "none", "null", "<noinput>"})
"""Texts that tables and scripts write for an empty optional column."""
_OPTIONAL = ("input", "system", "history")
_WITH_MESSAGES = {*CONVERSATION_KEYS, *QUESTION_KEYS, *ANSWER_KEYS, "chosen", "rejected"}
_THOUGHT_PARTS = ("thinking", "reasoning", "reasoning_text", "thought")
"""Types of the parts of a content that are a thought, not an answer."""
_MIN_KEYED = 2
_MIN_PROSE_WORDS = 5
"""Number of words from which an unread text might be the one that was meant."""


class ColumnMapping:
    """The mapping that `data.columns` asks for; without entries, what the values show.

    Raises:
        ValueError: an entry is invalid, see `agents.contract.data`.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        names = parse_columns(entries)
        self.columns, self.roles = names.columns, names.roles
        self._rated = {name: one for name, one in self.columns.items() if one in RATED}
        self._renamed = {name: one for name, one in self.columns.items() if one not in RATED}
        self._good = next((name for name, one in self._rated.items() if one == "good"), "")

    def leave_out(self, row: Any) -> str:
        """Return why the mapping leaves a row out: it is a bad example; empty: it does not."""
        value = row.get(self._good) if isinstance(row, dict) and self._good else None
        if value is None or judge_verdict(self._good, value) != "bad":
            return ""
        return f"'{self._good}' calls it a bad example, and only good ones are asked for"

    def apply(self, row: Any) -> Any:
        """Return a row with the columns that the formats read; `row` itself is unchanged.

        Raises:
            ValueError: it has no two rated answers, but the mapping makes a pair of them.
        """
        if isinstance(row, list) and self.columns:
            row = {str(place): value for place, value in enumerate(row)}
        elif _is_conversation("", row):  # messages without an object around them
            row = {CONVERSATION_KEYS[0]: row}
        if not isinstance(row, dict):
            return row
        shaped = self._rename(row) if self.columns else dict(row)
        if "candidates" in self._rated.values():
            best, worst = rank_answers(row, self._rated)
            # Other columns about the answers have been weighed by the one that the user names.
            rated = [key for key in shaped if find_kind(str(key)).kind in ("verdict", "score")]
            shaped = {key: value for key, value in shaped.items() if key not in rated}
            shaped |= {"chosen": best, "rejected": worst}
        _drop_nothing(shaped)
        _find_sides(shaped)
        self._find_messages(shaped)
        for name in _WITH_MESSAGES & shaped.keys():
            if isinstance(shaped[name], list):
                shaped[name] = [_take_out_thought(one) for one in shaped[name]]
        asked = first_of(shaped.keys(), QUESTION_KEYS)
        if "chosen" in shaped and "rejected" in shaped:
            _shape_pair(shaped, asked)
        elif asked and first_of(shaped.keys(), ANSWER_KEYS) and "history" in shaped:
            _join_question(shaped, asked)
        return shaped

    def _rename(self, row: dict[Any, Any]) -> dict[Any, Any]:
        found = {one: _find(row, name, one) for name, one in self._renamed.items()}
        read = {*self.columns, *(part for name in self.columns for part in name.split("."))}
        kept = {key: value for key, value in row.items() if key not in read}
        # A column that keeps its name but is not the wanted one would be read in its place.
        return {**kept, **{wanted: value for wanted, value in found.items() if value is not None}}

    def _find_messages(self, row: dict[Any, Any]) -> None:
        key = first_of(row.keys(), CONVERSATION_KEYS) or _find_conversation(row)
        if key is None:
            return
        given = find_turns(_transpose(row[key]))
        turns = _name_parts(given) or given
        if turns is not None:
            row[key] = turns
        shaped = shape_turns(turns, is_mapped=key in self.columns.values())
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


def _find(row: Mapping[Any, Any], name: str, wanted: str) -> Any:
    """Return the value of a column, of a field in it (`translation.en`), or a choice.

    `choices.answer` is the choice that the column `answer` numbers from 0, or names by a letter.

    >>> _find({"choices": ["x", "y"], "answer": "B"}, "choices.answer", "output")
    'y'
    >>> _find({"choices": ["x", "y"]}, "choices", "input")
    'A. x\\nB. y'
    """
    value: Any = row
    labels: Any = None
    for part in (name,) if name in row else name.split("."):
        if isinstance(value, list):
            value = _choose(value, labels, row.get(part))
        else:
            labels = value.get("label") if isinstance(value, dict) else None
            value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return str(value) if is_number and wanted == "output" else value
    if wanted == "input":
        return "\n".join(f"{chr(ord('A') + at)}. {one}" for at, one in enumerate(value))
    # SQuAD writes the only answer as a list.
    is_one = name not in row or (len(value) == 1 and wanted in ("instruction", "output", "text"))
    return value[0] if is_one else value


def _choose(choices: Sequence[Any], labels: Any, key: Any) -> Any:
    """Return the choice with a label, a number from 0, or a letter; None: none has it."""
    text = str(key).strip()
    if isinstance(labels, list) and text in labels:
        place = labels.index(text)
    elif text.isdecimal():
        place = int(text)
    else:
        place = ord(text.upper()) - ord("A") if len(text) == 1 else -1
    return choices[place] if 0 <= place < len(choices) else None


def _drop_nothing(row: dict[Any, Any]) -> None:
    """Empty the cells for which a table writes NaN or such a text; write numbers as texts."""
    for key, value in [*row.items()]:
        is_text = isinstance(value, str) and key in _OPTIONAL
        if value != value or (is_text and value.strip().lower() in _NOTHING):
            row[key] = None
        elif key in _OPTIONAL and isinstance(value, (int, float)) and not isinstance(value, bool):
            row[key] = str(value)  # else 0 would be taken for an empty one
    # A table that joins several sets has the columns of all, empty but for those of the row.
    if any(row.get(key) is not None for key in KNOWN_KEYS - {"system"}):
        for key in (*CONVERSATION_KEYS, "chosen", "rejected"):
            if key in row and row[key] is None:
                del row[key]


def _take_out_thought(message: Any) -> Any:
    """Return a message whose parts that are thoughts stand in a key of their own."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not message.keys().isdisjoint(THOUGHT_KEYS):
        return message
    thoughts, said = [], []
    for part in parts:
        is_thought = isinstance(part, dict) and part.get("type") in _THOUGHT_PARTS
        texts = [part.get(key) for key in (*THOUGHT_KEYS, "text")] if is_thought else []
        text = next((one for one in texts if isinstance(one, str)), None)
        if text is None:
            said.append(part)
        else:
            thoughts.append(text)
    if not thoughts:
        return message
    return {**message, "content": said, THOUGHT_KEYS[0]: "\n\n".join(thoughts)}


def _transpose(value: Any) -> Any:
    """Return an object of lists, as some tables hold a list of objects, as that list."""
    lists = list(value.values()) if isinstance(value, dict) else []
    if not lists or not all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists):
        return value
    return [dict(zip(value, parts, strict=True)) for parts in zip(*lists, strict=True)]


def _name_parts(turns: Any) -> list[Any] | None:
    """Return messages with the usual names of their roles and texts; None: they have others.

    Another name counts only if each message has it with a role that is known.
    """
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    keys = set(turns[0]).intersection(*turns) if turns else set()
    role_key, said_key = first_of(keys, _ROLE_KEYS), first_of(keys, _SAID_KEYS)
    if role_key is None or said_key is None:
        return None
    said = [str(turn[role_key]).lower() for turn in turns]
    is_usual = role_key in ("role", "from") and said_key in ("content", "value")
    is_known = all(role in KNOWN_ROLES for role in said)
    if _NEWER_ROLES.keys().isdisjoint(said) if is_usual else not is_known:
        return None
    named = []
    for role, turn in zip(said, turns, strict=True):
        left = {key: part for key, part in turn.items() if key not in (role_key, said_key)}
        known = KNOWN_ROLES.get(role, turn[role_key])
        named.append({"role": known, "content": turn[said_key], **left})
    return named


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
    if name.lower() in CONVERSATIONS and _name_parts(turns):
        return True
    return name.lower() in CONVERSATIONS and shape_turns(turns, is_mapped=False) is not None


def shape_turns(turns: Any, *, is_mapped: bool) -> list[dict[str, Any]] | None:
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
            asked = row.get("input")
            if isinstance(asked, dict) and "messages" in asked:  # OpenAI's pairs
                del row["input"]
                row |= {"prompt": asked["messages"], "tools": asked.get("tools")}


def _shape_pair(row: dict[Any, Any], asked: str | None) -> None:
    """Join the parts of a pair's question; turn transcripts into messages."""
    if asked is None and row.get("input"):
        row["prompt"] = row.pop("input")
        return
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
    before = shape_turns(turns, is_mapped=False)
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


def explain_reading(given: Mapping[Any, Any], shaped: Mapping[Any, Any], data_format: str) -> str:
    """Return why a row is taken for one of a format, and what makes that uncertain; empty: its
    columns have the names of the format.

    >>> row = {"question": "Why?", "answer": "So.", "draft": "Let me think about it."}
    >>> explain_reading(row, row, "alpaca")
    "alpaca rows, by 'question' and 'answer'; not certain, since 'draft' holds text, too"
    >>> explain_reading({"items": []}, {"messages": []}, "chat")
    "chat rows, by 'items'"
    """
    used = used_columns(shaped.keys(), data_format) - TOOL_KEYS
    moved = [key for key, value in given.items() if key not in shaped and value is not None]
    names = [key for key in given if key in used or key in moved]
    others = [
        key
        for key, value in given.items()
        if key in shaped and isinstance(key, str) and key not in KNOWN_KEYS
        and shape_of(value) == "text" and len(str(value).split()) >= _MIN_PROSE_WORDS
        and find_kind(key).kind == "unknown" and not is_about(key)
    ]  # fmt: skip
    said = " and ".join(map(quote, names)) if names else "their shape"
    if others and data_format in ("alpaca", "text"):
        said += f"; not certain, since {quote(others[0])} holds text, too"
    elif KNOWN_KEYS.issuperset(names):
        return ""
    return f"{data_format} rows, by {said}"


def find_turns(value: Any) -> Any:
    """Return a list, or the list that a text of JSON holds, as tables write it; else None."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _find_keyed(value: dict[Any, Any]) -> list[Any] | None:
    """Return the rows of an object that has each under a key of its own, or None."""
    rows = list(value.values())
    # A column's name says that the object is a row itself.
    is_keyed = len(rows) >= _MIN_KEYED and KNOWN_KEYS.isdisjoint(value)
    is_keyed = is_keyed and all(isinstance(row, dict) for row in rows)
    return rows if is_keyed and all(KNOWN_KEYS & row.keys() for row in rows) else None


def unfold(rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield the numbered values of a file, or the rows inside of its only object.

    Only an object around the whole file is such a wrapper: `{"version": 1, "data": [{...}]}`, or
    `{"first": {...}, "second": {...}}`. A
    list inside of a row belongs to that row.
    """
    first, second = next(rows, None), next(rows, None)
    if first is None:
        return
    is_wrapper = second is None and isinstance(first[1], dict) and not _find_conversation(first[1])
    inside = find_rows_inside(first[1]) if is_wrapper else None
    if inside is None and is_wrapper:
        inside = _find_keyed(first[1])
    if inside is not None:
        yield from enumerate(inside, start=1)
        return
    yield first
    if second is not None:
        yield second
        yield from rows

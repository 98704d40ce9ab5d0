"""What one row means: a conversation, or plain text.

Every shape that people's files have becomes one of the two. Instruction rows (Alpaca) become a
conversation of one question and one answer, so that there is one way to turn rows into tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agents.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_QUESTION_KEYS = ("instruction", "prompt", "question")
_ANSWER_KEYS = ("output", "response", "completion", "answer")
_SHAPES = "chat rows have 'messages', instruction rows 'instruction' and 'output', text rows 'text'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing to learn from: either turns or text."""

    number: int
    """Line of the file, or place in its list, from 1."""
    turns: tuple[Turn, ...] = ()
    text: str = ""


def choose_format(value: Any) -> str:
    """Return the format that the first row of a file shows.

    Raises:
        ValueError: its keys fit none.
    """
    keys = _keys(value)
    if "chosen" in keys and "rejected" in keys:
        return "preference"
    if "messages" in keys or "conversations" in keys:
        return "chat"
    if _first(keys, _QUESTION_KEYS) and _first(keys, _ANSWER_KEYS):
        return "alpaca"
    if "text" in keys:
        return "text"
    raise ValueError(f"the row has the keys {sorted(keys)}, but {_SHAPES}")


def read_row(number: int, value: Any, data_format: str) -> Row | str:
    """Return the row, or the reason why it is empty.

    Raises:
        ValueError: it does not have the shape of its format.
        UserError: this version does not read the format.
    """
    if data_format == "preference":
        raise UserError(
            "Preference data (chosen and rejected answers) needs objective dpo, "
            "which this version does not train.",
            "Give chat, instruction or text rows, with objective: sft",
        )
    keys = _keys(value)
    if data_format == "chat":
        return _read_chat(number, value, keys)
    if data_format == "alpaca":
        return _read_instruction(number, value, keys)
    text = _text(value, "text", keys)
    return Row(number=number, text=text) if text.strip() else "the text is empty"


def _keys(value: Any) -> set[str]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object {{...}}, found {_name(value)}")
    return set(value)


def _name(value: Any) -> str:
    names = {list: "a list", str: "a string", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "an object")


def _first(keys: set[str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in keys), None)


def _text(value: dict[str, Any], key: str, keys: set[str]) -> str:
    if key not in keys:
        raise ValueError(f"'{key}' is missing; the row has the keys {sorted(keys)}")
    if not isinstance(value[key], str):
        raise ValueError(f"'{key}' should be a string, but is {_name(value[key])}")
    return _whole(value[key], key)


def _whole(text: str, key: str) -> str:
    """Return `text` when it can be written as UTF-8; JSON can smuggle in half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"'{key}' holds half a character (a lone surrogate)") from error
    return text


def _read_instruction(number: int, value: dict[str, Any], keys: set[str]) -> Row | str:
    asked = _first(keys, _QUESTION_KEYS) or _QUESTION_KEYS[0]
    answered = _first(keys, _ANSWER_KEYS) or _ANSWER_KEYS[0]
    question, answer = _text(value, asked, keys), _text(value, answered, keys)
    if value.get("input"):
        question = f"{question}\n\n{_text(value, 'input', keys)}"
    if not question.strip():
        return f"'{asked}' is empty"
    if not answer.strip():
        return f"'{answered}' is empty"
    turns = [Turn(role="user", content=question), Turn(role="assistant", content=answer)]
    if value.get("system"):
        turns.insert(0, Turn(role="system", content=_text(value, "system", keys)))
    return Row(number=number, turns=tuple(turns))


def _read_chat(number: int, value: dict[str, Any], keys: set[str]) -> Row | str:
    key = "messages" if "messages" in keys else "conversations"
    if key not in keys:
        raise ValueError(f"'messages' is missing; the row has the keys {sorted(keys)}")
    messages = value[key]
    if isinstance(messages, str):  # a column of a CSV file
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise ValueError(f"'{key}' is a string that is not JSON") from error
    if not isinstance(messages, list):
        raise ValueError(f"'{key}' should be a list, but is {_name(messages)}")
    turns = tuple(_read_turn(place, message) for place, message in enumerate(messages, start=1))
    if not turns:
        return "the conversation is empty"
    if not any(turn.role == "assistant" and turn.content.strip() for turn in turns):
        return "the conversation has no answer of the assistant"
    return Row(number=number, turns=turns)


def _read_turn(place: int, message: Any) -> Turn:
    if not isinstance(message, dict):
        raise ValueError(f"message {place} should be an object, but is {_name(message)}")
    role = message.get("role", message.get("from"))
    role = _ROLE_NAMES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"message {place} has the role {role!r}; it must be one of {list(ROLES)}")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = _join_parts(place, content)
    if not isinstance(content, str):
        raise ValueError(f"message {place} has no text: 'content' is {_name(content)}")
    return Turn(role=role, content=_whole(content, f"message {place}"))


def _join_parts(place: int, parts: list[Any]) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise ValueError(f"message {place} has a part without text; only text is trained")
        texts.append(text)
    return "".join(texts)

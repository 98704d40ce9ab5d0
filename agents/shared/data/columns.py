"""Choose the columns of a row that are read, given its format.

Shared, since the master judges a data set by the same rules before it sends it.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

QUESTION_KEYS = ("instruction", "prompt", "question")
ANSWER_KEYS = ("output", "response", "completion", "answer")
CONVERSATION_KEYS = ("messages", "conversations")
KNOWN_KEYS = frozenset(
    {*QUESTION_KEYS, *ANSWER_KEYS, *CONVERSATION_KEYS, "text", "input", "system"}
    | {"chosen", "rejected"}
)
"""Names of columns that are read."""
TOOL_KEYS = frozenset({"tools", "functions"})
"""Names of columns with tool definitions, which the chat template gets."""
TURN_KEYS = frozenset({"role", "content", "from", "value", "refusal", "train_detail"})
"""Keys of a message that are read; others only reach the chat template."""
CALL_KEYS = frozenset({"tool_calls", "function_call", "function_calls"})
"""Keys of a message that calls tools."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of the thought before an answer, in a message or an instruction row."""
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Texts that open and close a thought within an answer, by family."""
BYTES = "\0bytes"
"""Key of an object that replaces binary values, with their number of bytes."""
_SHAPES = (
    "chat rows have 'messages', instruction rows 'instruction' and 'output', text rows 'text', "
    "preference rows 'chosen' and 'rejected'"
)
_MAX_QUOTED_CHARS = 40
_MAX_QUOTED_KEYS = 20


def choose_format(value: Any) -> str:
    """Return the format of a file, judged by its first row.

    Raises:
        ValueError: The row's keys match no format.
    """
    keys = keys_of(value)
    # Before the other formats, since preference rows have a prompt, too.
    if "chosen" in keys and "rejected" in keys:
        return "preference"
    if first_of(keys, CONVERSATION_KEYS):
        return "chat"
    asked = first_of(keys, QUESTION_KEYS)
    if asked and first_of(keys, ANSWER_KEYS):
        # TRL's prompt and completion columns hold messages or plain texts.
        return "chat" if isinstance(value[asked], (list, dict)) else "alpaca"
    if "text" in keys:
        return "text"
    tokens = first_of(keys, ("input_ids", "prompt_ids", "prompt_input_ids"))
    if tokens:
        raise ValueError(f"the row is tokenized already ('{tokens}'); only texts are trained")
    raise ValueError(f"the row has the keys {quote_keys(keys)}, but {_SHAPES}")


def used_columns(keys: Set[str], data_format: str) -> frozenset[str]:
    """Return the columns that a format reads of a row, with its tools.

    >>> sorted(used_columns({"prompt", "completion", "label"}, "alpaca"))
    ['completion', 'prompt']
    >>> sorted(used_columns({"messages", "prompt", "tools"}, "chat"))
    ['messages', 'tools']
    """
    return _find_used(frozenset(keys), data_format)


# Rows of a data set have few distinct sets of keys.
@functools.lru_cache(maxsize=256)
def _find_used(keys: frozenset[str], data_format: str) -> frozenset[str]:
    if data_format == "text":
        return frozenset({"text"} & keys)
    asked, answered = first_of(keys, QUESTION_KEYS), first_of(keys, ANSWER_KEYS)
    used: set[str | None] = {"system", *TOOL_KEYS}
    if data_format == "preference":
        used |= {asked, "chosen", "rejected"}
    elif data_format == "chat":
        turns = first_of(keys, CONVERSATION_KEYS)
        used |= {turns} if turns else {asked, answered}
    else:
        used |= {asked, answered, "input"}
    return frozenset(name for name in used if name is not None and name in keys)


def find_rows_inside(value: Any) -> list[Any] | None:
    """Return the only list of objects within an object, or None if the object is a row itself."""
    if not isinstance(value, dict) or KNOWN_KEYS.intersection(value):
        return None
    lists = [item for item in value.values() if isinstance(item, list) and item]
    lists = [rows for rows in lists if all(isinstance(row, dict) for row in rows)]
    return lists[0] if len(lists) == 1 else None


def keys_of(value: Any) -> set[str]:
    """Return the keys of a row.

    Raises:
        ValueError: It is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"expected an object {{...}}, found {name_kind(value)}")
    return set(value)


def first_of(keys: Set[str], names: tuple[str, ...]) -> str | None:
    """Return the first of the names that is a key, or None."""
    return next((name for name in names if name in keys), None)


def name_kind(value: Any) -> str:
    """Return the kind of a value, in terms of JSON."""
    names = {list: "a list", str: "a string", type(None): "null", bool: "true or false"}
    if isinstance(value, bytes) or (isinstance(value, dict) and BYTES in value):
        return "bytes"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "an object")


def quote(text: str) -> str:
    """Return a text in quotes, cut to a readable length."""
    short = text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
    return repr(short)


def quote_keys(keys: Set[str]) -> str:
    """Return the keys in quotes, shortened if there are many."""
    quoted = ", ".join(quote(key) for key in sorted(keys)[:_MAX_QUOTED_KEYS])
    more = len(keys) - _MAX_QUOTED_KEYS
    return f"[{quoted} and {more} more]" if more > 0 else f"[{quoted}]"

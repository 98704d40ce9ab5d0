"""Read tool definitions and calls in the spellings of data sets, and write them as templates do.

Definitions are OpenAI's `tools`, its older `functions`, or bare objects with a name. Calls are
`tool_calls`, `function_call`, or the text of a `function_call` turn (ShareGPT). Both may be JSON in
a text, as tables write them. Chat templates get them in OpenAI's newer form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agents.shared.data import columns

_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_NAME_KEYS = ("name", "tool_name")
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_NOTHING = ("", "[]", "{}", "null")


class ToolError(ValueError):
    """Raised for definitions or calls of tools that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    name: str
    arguments: Any
    """An object, or its JSON for templates that write text."""
    id: str = ""
    """Id by which the tool's result refers to the call; empty: it has none."""

    @property
    def message(self) -> dict[str, Any]:
        """The call as a template gets it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": function}

    @property
    def as_text(self) -> ToolCall:
        """The call with its arguments as JSON."""
        is_text = isinstance(self.arguments, str)
        return self if is_text else replace(self, arguments=_dump(self.arguments))


def holds(value: Any) -> bool:
    """Return whether a value is not empty; tables write an empty cell in several ways."""
    if isinstance(value, str):
        return value.strip() not in _NOTHING
    if isinstance(value, dict):  # Parquet may keep the fields of a missing object
        return any(field is not None for field in value.values())
    return bool(value) and value == value  # tables write NaN for an empty cell


def read_tools(values: Mapping[Any, Any]) -> str:
    """Return the tools that a row or a message offers, as JSON; empty: it offers none.

    Raises:
        ToolError: they are no definitions.

    >>> read_tools({"functions": [{"name": "sky", "parameters": {}}]})
    '[{"type": "function", "function": {"name": "sky", "parameters": {}}}]'
    """
    for key in sorted(columns.TOOL_KEYS & values.keys(), reverse=True):  # OpenAI's newer key first
        if holds(values[key]):
            found = [_define(one, key) for one in _list(values[key], f"'{key}'")]
            return _dump(found)
    return ""


def _define(tool: Any, key: str) -> dict[str, Any]:
    tool = _parse(tool, f"'{key}'") if isinstance(tool, str) else tool
    if not isinstance(tool, dict):
        raise ToolError(f"'{key}' should define tools, but has {columns.name_kind(tool)}")
    if isinstance(tool.get("type"), str) and tool["type"] != "function" and "name" not in tool:
        return tool  # a tool of the model itself, such as a search
    inner = tool.get("function", tool)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ToolError(f"a tool in '{key}' has no name")
    inner = {name: part for name, part in inner.items() if name != "type" or inner is not tool}
    return {"type": "function", "function": inner}


def read_calls(place: int, message: Mapping[Any, Any]) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message.

    Raises:
        ToolError: a call has no name, or its arguments are no JSON object.
    """
    return tuple(
        _read_call(place, call)
        for key in sorted(columns.CALL_KEYS & message.keys())
        if holds(message[key])
        for call in _list(message[key], f"'{key}' of message {place}")
        if holds(call)
    )


def read_called_text(place: int, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return thought and calls of a turn whose text is the call.

    Raises:
        ToolError: it is no call.

    >>> read_called_text(2, '{"name": "sky", "arguments": {}}')
    ('', (ToolCall(name='sky', arguments={}, id=''),))
    """
    thought = found[0] if (found := _THOUGHT.match(text)) else ""
    said = text[len(thought) :]
    named = f"message {place}, the call of a tool,"
    parts: Iterable[Any] = _TAGGED.findall(said) or _list(said, named)
    calls = tuple(_read_call(place, part) for part in parts)
    if not calls:
        raise ToolError(f"{named} is empty")
    return thought, calls


def _read_call(place: int, call: Any) -> ToolCall:
    call = _parse(call, f"a tool call of message {place}") if isinstance(call, str) else call
    inner = call.get("function", call) if isinstance(call, dict) else None
    inner = inner if isinstance(inner, dict) else call
    name = next((inner[key] for key in _NAME_KEYS if key in inner), None) if inner else None
    if not isinstance(name, str) or not name.strip():
        raise ToolError(f"message {place} calls a tool without a name")
    arguments: Any = next((inner[key] for key in _ARGUMENT_KEYS if inner.get(key) is not None), {})
    named = f"the arguments of {columns.quote(name)} in message {place}"
    if isinstance(arguments, str):
        arguments = _parse(arguments, named) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ToolError(f"{named} should be an object, but are {columns.name_kind(arguments)}")
    own = call.get("id")
    return ToolCall(name=name, arguments=arguments, id=own if isinstance(own, str) else "")


def write_result(value: Any) -> str:
    """Return the text of a tool's result, which may be any value."""
    return "" if value is None else value if isinstance(value, str) else _dump(value)


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the null fields of its objects: the table has no others.

    >>> without_nulls([{"name": "sky", "arguments": {"city": None, "days": 2}}])
    [{'name': 'sky', 'arguments': {'days': 2}}]
    """
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _list(value: Any, named: str) -> list[Any]:
    value = _parse(value, named) if isinstance(value, str) else value
    return value if isinstance(value, list) else [value]


def _parse(text: str, named: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{named} should be JSON, but is {columns.quote(text)}") from error


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

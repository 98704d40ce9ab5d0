"""Find the problems in the values of a run file, and describe them so that a person can act.

Each problem names the line, the key, the value, the limit and the nearest valid word. pydantic
checks the types of RunSpec, RunSpec its own limits; this module turns both into sentences.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agents.contract.spec import RunSpec, run_keys

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    line: int | None
    text: str
    meant: KeyPath = ()
    """Key that was probably meant, so that it is not reported as missing as well."""
    path: KeyPath = ()
    """Key that is wrong; empty: the problem is of the file."""


def find_problems(data: Any, lines: dict[KeyPath, int]) -> list[Problem]:
    """Return all problems of `data`; `lines` maps each key to its line."""
    problems = _unknown_keys(data, RunSpec, (), lines)
    meant = {problem.meant for problem in problems}
    return problems + _invalid_values(data, lines, meant)


def refuse_key(name: str) -> str:
    """Return why a dotted key is not used, with the key that was probably meant; empty: it is.

    >>> refuse_key("adaptor.rank"), refuse_key("rank"), refuse_key("seed")
    ('adaptor.rank is not known; did you mean adapter.rank?', 'rank is not known; did you mean \
adapter.rank?', '')
    """
    keys = list(run_keys())
    if name in keys:
        return ""
    last = {key.rpartition(".")[2]: key for key in keys}
    near = [last[name]] if name in last else difflib.get_close_matches(name, keys, n=1)
    near = near or [last[one] for one in difflib.get_close_matches(name, last, n=1)]
    known = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
    return f"{name} is not known; {known}"


def validate(data: Any) -> RunSpec:
    """Build the spec.

    Raises:
        ValidationError: a value has the wrong type or breaks a limit.
    """
    # Through JSON, because strict mode then takes lists for tuples and whole numbers for floats,
    # and still refuses `yes` for a number or 3 for a name.
    return TypeAdapter(RunSpec).validate_json(json.dumps(data, default=str), strict=True)


def dotted(path: KeyPath) -> str:
    """Return a key's path as people write it, such as `adapter.rank` or `shares[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _unknown_keys(data: Any, cls: Any, path: KeyPath, lines: dict[KeyPath, int]) -> list[Problem]:
    if not isinstance(data, dict):
        return []
    hints = typing.get_type_hints(cls)
    problems = []
    for key, value in data.items():
        here = (*path, str(key))
        if key not in hints:
            problems.append(_unknown_key(here, list(hints), lines.get(here)))
        elif dataclasses.is_dataclass(hints[key]):
            problems += _unknown_keys(value, hints[key], here, lines)
    return problems


def _unknown_key(path: KeyPath, known: list[str], line: int | None) -> Problem:
    parent, key = path[:-1], str(path[-1])
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    meant: KeyPath = (*parent, near[0]) if near else _key_elsewhere(key)
    if meant:
        return Problem(
            line, f"{dotted(path)} is not known; did you mean {dotted(meant)}?", meant, path
        )
    where = f"under {dotted(parent)}" if parent else "in a run file"
    text = f"{dotted(path)} is not known; the keys {where} are {', '.join(known)}"
    return Problem(line, text, path=path)


def _key_elsewhere(key: str) -> KeyPath:
    """Find a key that belongs to another section, such as `rank` for `adapter.rank`."""
    for name, hint in typing.get_type_hints(RunSpec).items():
        if key == name:
            return (name,)
        if dataclasses.is_dataclass(hint) and key in typing.get_type_hints(hint):
            return (name, key)
    return ()


# ---------------------------------------------------------------- values


def _invalid_values(data: Any, lines: dict[KeyPath, int], meant: set[KeyPath]) -> list[Problem]:
    try:
        validate(data)
    except ValidationError as error:
        found: dict[KeyPath, Any] = {}
        for entry in error.errors(include_url=False):
            path = _real_path(entry["loc"])
            # A section that is wrong as a whole is reported once, and so is a union, of which every
            # option reports an error at the same path.
            if not (entry["type"] == "missing" and path in meant) and path[:-1] not in found:
                found.setdefault(path, entry)
        return [_value_problem(path, entry, lines) for path, entry in found.items()]
    except (ValueError, TypeError, RecursionError) as error:
        return [Problem(None, f"a value cannot be read: {error}")]
    return []


def _real_path(location: tuple[str | int, ...]) -> KeyPath:
    """Drop what pydantic adds to name the options of a union, such as `tuple[str, ...]`."""
    path: list[str | int] = []
    cls: Any = RunSpec
    for part in location:
        if isinstance(part, int):
            path.append(part)
        elif dataclasses.is_dataclass(cls) and part in typing.get_type_hints(cls):
            path.append(part)
            cls = typing.get_type_hints(cls)[part]
        elif not path:
            path.append(part)
    return tuple(path)


def _value_problem(path: KeyPath, entry: Any, lines: dict[KeyPath, int]) -> Problem:
    name = dotted(path)
    # A missing key has no line of its own, so its section's is used.
    line = lines.get(path) or lines.get(path[:-1])
    if entry["type"] == "missing":
        parent = dotted(path[:-1])
        text = f"{name} is missing" + (f" under {parent}" if parent else "")
        return Problem(line, text, path=path)
    if entry["type"] == "value_error":
        return _limit_problem(path, entry, lines)
    if path == () or entry["type"] == "dataclass_type":
        text = f"{name or 'the file'} must be a list of `key: value` lines"
        return Problem(line, text, path=path)
    text = f"{name} is {_shown(entry['input'])}; it must be {_wanted(path, entry)}"
    return Problem(line, text, path=path)


def _limit_problem(path: KeyPath, entry: Any, lines: dict[KeyPath, int]) -> Problem:
    """Describe a broken limit of `__post_init__`, whose text begins with the field's name."""
    text = str(entry["ctx"]["error"])
    key = (*path, *text.split(" ", 1)[0].split("."))
    prefix = dotted(path)
    line = lines.get(key) or lines.get(path)
    return Problem(line, f"{prefix}.{text}" if prefix else text, path=key)


def _wanted(path: KeyPath, entry: Any) -> str:
    hint = _hint_at(path)
    words = _allowed_words(hint)
    if words and isinstance(entry["input"], str):
        near = difflib.get_close_matches(entry["input"], words, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]}?" if near else ""
        # Words are listed already: add only the other kinds, such as a number.
        rest = _kind_text(hint, without_words=True)
        return "one of " + ", ".join(words) + (f", or {rest}" if rest else "") + guess
    return _kind_text(hint)


def _hint_at(path: KeyPath) -> Any:
    hint: Any = RunSpec
    for part in path:
        hint = _item_hint(hint) if isinstance(part, int) else typing.get_type_hints(hint)[part]
    return hint


def _item_hint(hint: Any) -> Any:
    for option in _options(hint):
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return Any


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _allowed_words(hint: Any) -> list[str]:
    return [
        str(word)
        for option in _options(hint)
        if typing.get_origin(option) is typing.Literal
        for word in typing.get_args(option)
    ]


_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _kind_text(hint: Any, without_words: bool = False) -> str:
    """Return what a value must be, in words.

    >>> _kind_text(float | None)
    'a number or null'
    """
    texts = []
    for option in _options(hint):
        if typing.get_origin(option) is typing.Literal:
            if not without_words:
                texts += [str(word) for word in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            texts.append("a list of " + _KINDS[typing.get_args(option)[0]].split(" ", 1)[1] + "s")
        else:
            texts.append(_KINDS[option])
    return (
        texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1] if texts else ""
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

"""Find the problems in the values of a run file, and describe them for the user.

Each problem names the line, the key, the value, the limit and the nearest valid word. pydantic
checks the types of RunSpec, and RunSpec checks its limits; this module turns both into sentences.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agents.contract.data import SourceSpec
from agents.contract.key import RunKey
from agents.contract.objectives import ROW_FORMATS
from agents.contract.spec import RunSpec, run_keys

KeyPath = tuple[str | int, ...]
_SOURCES: KeyPath = ("data", "sources")
_SOURCE_WORDS: dict[str | int, str] = {
    "path": "a text",
    "format": f"one of {', '.join(ROW_FORMATS)}",
    "columns": "a mapping, such as {instruction: question}",
    "weight": "a number",
    "max_rows": "a whole number",
    "split": "a text",
    "sources": "a list of paths, or of `path` with more keys",
}


@dataclass(frozen=True, slots=True)
class Problem:
    line: int | None
    text: str
    meant: KeyPath = ()
    """Key that was probably meant, which is then not reported as missing."""
    path: KeyPath = ()
    """Wrong key; empty: the problem concerns the whole file."""


def find_problems(data: Any, lines: dict[KeyPath, int]) -> list[Problem]:
    """Return all problems of `data`, given the line of each key."""
    problems = _unknown_keys(data, (), lines)
    meant = {problem.meant for problem in problems}
    return problems + _invalid_values(data, lines, meant)


def refuse_key(name: str) -> str:
    """Return why a dotted key is unknown, with the key that was probably meant; empty: it is known.

    >>> refuse_key("adaptor.rank"), refuse_key("rank"), refuse_key("seed")
    ('adaptor.rank is not known; did you mean adapter.rank?', 'rank is not known; did you mean \
adapter.rank?', '')
    """
    keys = list(run_keys())
    if name in keys:
        return ""
    # By its last part, since a bare key such as `rank` usually means that of a section.
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
    # Through JSON, since strict mode then accepts lists as tuples and whole numbers as floats, but
    # still refuses `yes` as a number or 3 as a name.
    return TypeAdapter(RunSpec).validate_json(json.dumps(data, default=str), strict=True)


def dotted(path: KeyPath) -> str:
    """Return a key's path in dotted form, such as `adapter.rank` or `shares[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _keys_under(section: KeyPath) -> list[str]:
    """Return the keys and sections of a section; empty: not a section."""
    if section[:2] == _SOURCES and len(section) == 3:
        return [field.name for field in dataclasses.fields(SourceSpec)]
    start = "".join(f"{part}." for part in section)
    rest = [name.removeprefix(start) for name in run_keys() if name.startswith(start)]
    return list(dict.fromkeys(name.partition(".")[0] for name in rest))


def _unknown_keys(data: Any, section: KeyPath, lines: dict[KeyPath, int]) -> list[Problem]:
    if section == _SOURCES and isinstance(data, list):
        items = (_unknown_keys(one, (*section, n), lines) for n, one in enumerate(data))
        return [problem for found in items for problem in found]
    known = _keys_under(section)
    if not known or not isinstance(data, dict):
        return []
    problems = []
    for key, value in data.items():
        here = (*section, str(key))
        if key in known:
            problems += _unknown_keys(value, here, lines)
        else:
            problems.append(_unknown_key(here, known, lines.get(here)))
    return problems


def _unknown_key(path: KeyPath, known: list[str], line: int | None) -> Problem:
    parent, key = path[:-1], str(path[-1])
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    is_source = parent[:2] == _SOURCES
    meant: KeyPath = (*parent, near[0]) if near else () if is_source else _key_elsewhere(key)
    if meant:
        return Problem(
            line, f"{dotted(path)} is not known; did you mean {dotted(meant)}?", meant, path
        )
    where = f"under {dotted(parent)}" if parent else "in a run file"
    text = f"{dotted(path)} is not known; the keys {where} are {', '.join(known)}"
    return Problem(line, text, path=path)


def _key_elsewhere(key: str) -> KeyPath:
    """Find a key that belongs to another section, such as `rank` for `adapter.rank`."""
    if key in _keys_under(()):
        return (key,)
    paths = (tuple(name.split(".")) for name in run_keys())
    return next((path for path in paths if path[-1] == key), ())


# ---------------------------------------------------------------- values


def _invalid_values(data: Any, lines: dict[KeyPath, int], meant: set[KeyPath]) -> list[Problem]:
    try:
        validate(data)
    except ValidationError as error:
        found: dict[KeyPath, Any] = {}
        for entry in error.errors(include_url=False):
            path = _real_path(entry["loc"])
            # A wrong section is reported once without its keys. So is a union, each option of
            # which reports an error at the same path.
            if not (entry["type"] == "missing" and path in meant) and path[:-1] not in found:
                found.setdefault(path, entry)
        return [_value_problem(path, entry, lines) for path, entry in found.items()]
    except (ValueError, TypeError, RecursionError) as error:
        return [Problem(None, f"a value cannot be read: {error}")]
    return []


def _real_path(location: tuple[str | int, ...]) -> KeyPath:
    """Remove the parts by which pydantic names options of a union, such as `tuple[str, ...]`."""
    path: KeyPath = ()
    for part in location:
        if not path or isinstance(part, int) or part in _keys_under(path):
            path = (*path, part)
    return path


def _value_problem(path: KeyPath, entry: Any, lines: dict[KeyPath, int]) -> Problem:
    name = dotted(path)
    # A missing key has no line of its own, so use its section's.
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
    if path[:2] == _SOURCES:
        return _SOURCE_WORDS.get(path[-1], "a path, or `path` with more keys")
    if dotted(path) == "data.train" and isinstance(entry["input"], list):
        return "a text; name several sources as data.sources"
    key = run_keys()[".".join(part for part in path if isinstance(part, str))]
    if isinstance(path[-1], int):
        return "a number" if key.kind == "numbers" else "a text"
    words, kinds = [str(word) for word in key.words], _kinds(key)
    if words and isinstance(entry["input"], str):
        near = difflib.get_close_matches(entry["input"], words, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]}?" if near else ""
        # The words are listed already, so add only other kinds, such as a number.
        rest = _either(kinds)
        return "one of " + ", ".join(words) + (f", or {rest}" if rest else "") + guess
    return _either([*words, *kinds])


_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _kinds(key: RunKey) -> list[str]:
    """Return the kinds of value that a key accepts in addition to its words."""
    found = [_KINDS[option] for option in key.options if option in _KINDS]
    if key.kind in ("names", "numbers"):
        found.append("a list of numbers" if key.kind == "numbers" else "a list of texts")
    return [*found, "null"] if key.is_optional else found


def _either(texts: list[str]) -> str:
    """Join alternatives with commas and "or".

    >>> _either(["a number", "null"]), _either(["auto"])
    ('a number or null', 'auto')
    """
    return " or ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

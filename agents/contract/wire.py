"""Convert dataclasses to plain JSON values and back, checking types.

Both ends use this module: the app validates messages of nodes, a node validates those of the app.
Unknown fields are ignored, so that a newer peer may add fields; a missing field takes its default;
a wrong type is an error that names the field. If a dataclass has a method `check_foreign`, it is
called for values from the other side and raises ValueError for forbidden ones. Any content of a
value raises WireError only, and its message has at most a line or two.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

MIN_WHOLE, MAX_WHOLE = -(2**63), 2**63 - 1
"""Bounds of every whole number: the range of SQLite, file offsets and other languages."""
_SHOWN = 80
"""Maximum length of a quoted value or key in a message, in characters."""


class WireError(ValueError):
    """Raised when a value does not fit the dataclass that it should become."""


class ForeignValueError(WireError):
    """Raised for a forbidden value of the right type, such as a name with `..`."""


def shorten(value: Any) -> str:
    """Return the beginning of a foreign value, for an error message.

    >>> shorten("x" * 1000) == repr("x" * 80) + "..."
    True
    """
    text = ascii(value[:_SHOWN]) if isinstance(value, (str, bytes)) else ascii(value)[:_SHOWN]
    # `ascii` escapes lengthen a text, so compare its own length.
    is_whole = len(value) <= _SHOWN if isinstance(value, (str, bytes)) else len(text) < _SHOWN
    return text if is_whole else f"{text}..."


def to_wire(value: Any) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_wire(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_wire(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_wire(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no wire form")


def replace_surrogates(value: Any) -> Any:
    """Return a wire form of Unicode text: halves of a surrogate pair become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(k): replace_surrogates(v) for k, v in value.items()}
    return value


def from_wire(cls: type[T], value: Any, where: str = "") -> T:
    """Build a `cls` (a dataclass) from plain `value`.

    Raises:
        WireError: a field is missing or has the wrong type; the message names it.
    """
    result: T = _convert(cls, value, where or cls.__name__)
    return result


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, where)
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        # Compare types, too, since True equals 1.
        if any(type(value) is type(option) and value == option for option in allowed):
            return value
        raise WireError(f"{where}: {shorten(value)} is not one of {list(allowed)}")
    if origin is tuple:
        return _convert_tuple(hint, value, where)
    if origin is list:
        _expect(value, list, where)
        return [_convert(typing.get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _expect(value, dict, where)
        item = typing.get_args(hint)[1]
        return {str(k): _convert(item, v, _inside(where, k)) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return _convert_dataclass(hint, value, where)
    return _convert_plain(hint, value, where)


def _convert_plain(hint: Any, value: Any, where: str) -> Any:
    # In Python, True is an int; on the wire it is not.
    if hint in (int, float) and isinstance(value, bool):
        raise WireError(f"{where}: expected {hint.__name__}, got bool")
    if isinstance(value, int) and not MIN_WHOLE <= value <= MAX_WHOLE:
        raise WireError(f"{where}: {shorten(value)} is a whole number of more than 64 bits")
    # Some encoders write 1.0 as 1.
    if hint is float and isinstance(value, int):
        return float(value)
    _expect(value, hint, where)
    if isinstance(value, str):
        _expect_unicode(value, where)
    return value


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    problems = []
    for option in typing.get_args(hint):
        if option is type(None):
            if value is None:
                return None
            continue
        try:
            return _convert(option, value, where)
        except WireError as error:
            problems.append(str(error))
    # The first option is the usual one (`X | None`), so its problem is the most helpful one.
    raise WireError(problems[0] if problems else f"{where}: {shorten(value)} is not allowed")


def _convert_tuple(hint: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise WireError(f"{where}: expected a list, got {type(value).__name__}")
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(args) != len(value):
        raise WireError(f"{where}: expected {len(args)} items, got {len(value)}")
    return tuple(
        _convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True))
    )


def _convert_dataclass(cls: Any, value: Any, where: str) -> Any:
    _expect(value, dict, where)
    hints = _field_types(cls)
    known = {}
    for field in dataclasses.fields(cls):
        if field.name in value:
            known[field.name] = _convert(
                hints[field.name], value[field.name], f"{where}.{field.name}"
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise WireError(f"{where}.{field.name} is missing")
    try:
        made = cls(**known)
    # A rule in `__post_init__` may compute with values before it has rejected them.
    except (ValueError, ArithmeticError) as error:
        raise WireError(f"{where}: {error}") from error
    # Rules for values from the other side only: names, bounds.
    if check := getattr(made, "check_foreign", None):
        try:
            check()
        except ValueError as error:
            raise ForeignValueError(f"{where}: {error}") from error
    return made


@functools.cache
def _field_types(cls: Any) -> dict[str, Any]:
    """Return the resolved annotations of a dataclass."""
    # Cached, because resolving them takes longer than everything else about a message.
    return typing.get_type_hints(cls)


def _expect(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind):
        raise WireError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")


def _expect_unicode(text: str, where: str) -> None:
    # Half of a surrogate pair can be neither printed nor stored.
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise WireError(f"{where}: {shorten(text)} is not Unicode") from error


def _inside(where: str, key: object) -> str:
    return f"{where}.{str(key)[:_SHOWN]}"

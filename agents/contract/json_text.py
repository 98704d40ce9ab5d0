"""Read JSON from an untrusted source: any bytes give a value or a WireError.

Python's own reader accepts more than JSON, and fails in undeclared ways: it exhausts the stack on
brackets, decodes half of a surrogate pair, guesses UTF-16, and makes numbers that no float, file
offset or database column can hold. A value from here can be stored, shown and computed with.
"""

from __future__ import annotations

import json
import math
from typing import Any

from agents.contract.wire import MAX_WHOLE, MIN_WHOLE, WireError, shorten

MAX_DEPTH = 64
"""Maximum nesting of lists and objects; messages have fewer than ten levels, and model configs of
the hub fewer than twenty."""
_MAX_DIGITS = 20
"""Length of the longest whole number within the bounds, sign included, in characters."""


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value in `text`.

    Args:
        text: text, or bytes in UTF-8.
        finite: whether NaN and Infinity are errors, as JSON has them. Journals of diverged runs
            contain them.

    Raises:
        WireError: it is not JSON, or has something that no message has: text that is not Unicode,
        deep nesting, a number of more than 64 bits.
    """
    try:
        shown = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            shown,
            parse_int=_whole,
            parse_float=_finite if finite else float,
            parse_constant=_finite if finite else float,
        )
    # A short line of brackets nests deeply enough to exhaust the stack.
    except (ValueError, RecursionError, MemoryError) as error:
        raise WireError(f"not JSON: {shorten(text)}") from error
    # Both are cheap to rule out, and walking through every message would not be.
    if shown.count("[") + shown.count("{") > MAX_DEPTH or _may_hide_surrogates(shown):
        _check(value)
    return value


def read_said(line: str | bytes) -> dict[str, Any]:
    """Return the object in a line that a program printed, or an empty one if a library or login
    script printed it.
    """
    try:
        value = parse_json(line)
    except WireError:
        return {}
    return value if isinstance(value, dict) else {}


def _whole(text: str) -> int:
    # int() is quadratic in the digits, and CPython refuses more than 4300.
    number = int(text) if len(text) <= _MAX_DIGITS else MAX_WHOLE + 1
    if not MIN_WHOLE <= number <= MAX_WHOLE:
        raise ValueError("a whole number of more than 64 bits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number in JSON")
    return number


def _may_hide_surrogates(text: str) -> bool:
    return not text.isascii() or "\\ud" in text or "\\uD" in text


def _check(value: Any) -> None:
    # An own stack, since the nesting may be as deep as the recursion limit.
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            _check_text(item)
        elif isinstance(item, (list, dict)):
            if depth > MAX_DEPTH:
                raise WireError(f"lists and objects are nested more than {MAX_DEPTH} deep")
            if isinstance(item, dict):
                left += [(key, depth) for key in item]
                item = list(item.values())
            left += [(child, depth + 1) for child in item]


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise WireError(f"text that is not Unicode: {shorten(text)}") from error

"""Bounds of a model's tokenizer, whose rules are an untrusted program."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from agents.errors import ExpectedError, first_line
from agents.shared.files import bounded_work

LOAD_S = 120.0
"""Computing time for reading a tokenizer, in seconds. The largest real ones take ten."""
LOAD_BYTES = 4 << 30
"""Memory for reading a tokenizer with its classes, in bytes."""
MAX_TOKENS_PER_CHAR = 256
"""Maximum number of tokens of one character; the longest that Unicode expands has 54 bytes."""
# For any text, and for each of its characters. Real tokenizers take a hundredth of the time.
_LEAST_S = 10.0
_CHAR_S = 50e-6
_LEAST_BYTES = 1 << 30
_CHAR_BYTES = 500
_DECODED_CHARS = 64
# Real rules replace a space by one other character, or a few characters by a name.
_MAX_GROWTH = 4096
_PANIC = "PanicException"


@contextlib.contextmanager
def bounded_tokenizer(num_chars: int) -> Iterator[None]:
    """Bound a block that makes tokens of a text, or a text of tokens.

    Args:
        num_chars: number of characters of the text.

    Raises:
        ExpectedError: the tokenizer failed. If it takes too much time or memory, the process ends
            with the signal `TOKENIZER_KILLED`.
    """
    with bounded(_LEAST_S + _CHAR_S * num_chars, _LEAST_BYTES + _CHAR_BYTES * num_chars):
        yield


@contextlib.contextmanager
def bounded(cpu_s: float, more_bytes: int) -> Iterator[None]:
    """Bound any work of the tokenizers library.

    Raises:
        ExpectedError: the library failed.
    """
    try:
        with bounded_work.limited_library(cpu_s, more_bytes):
            yield
    except BaseException as error:
        # The library raises a bare Exception, or for a fault of its own a panic, which is none.
        is_panic = type(error).__name__ == _PANIC
        if not is_panic and not isinstance(error, MemoryError) and type(error) is not Exception:
            raise
        reason = first_line(error) if str(error) else "it takes all memory"
        raise ExpectedError(
            f"The tokenizer of this model cannot be used: {reason}.", bounded_work.TOKENIZER_HINT
        ) from None


def refuse_growth(tokenizer: Any) -> None:
    """Check that the rules that replace text cannot make a flood of a few characters.

    Raises:
        ExpectedError: they can.
    """
    backend = tokenizer.backend_tokenizer
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name)
        # The library's own copy of this part of tokenizer.json.
        growth = _measure_growth(json.loads(part.__getstate__())) if part is not None else 1.0
        if growth > _MAX_GROWTH:
            raise ExpectedError(
                f"The {name} of this model's tokenizer makes up to {growth:,.0f} characters of "
                "one, which no real one does.",
                bounded_work.TOKENIZER_HINT,
            )


def _measure_growth(rules: Any) -> float:
    """Return how many characters the rules can make of one, multiplied over all of them.

    >>> rule = {"type": "Replace", "pattern": {"String": "ab"}, "content": "x" * 10}
    >>> _measure_growth({"type": "Sequence", "normalizers": [rule, rule]})
    25.0
    """
    growth, waiting = 1.0, [rules]
    while waiting:
        rule = waiting.pop()
        if isinstance(rule, list):
            waiting += rule
        elif isinstance(rule, dict):
            waiting += [value for value in rule.values() if isinstance(value, (dict, list))]
            pattern = rule.get("pattern")
            if rule.get("type") == "Replace" and isinstance(pattern, dict):
                length = len(str(rule.get("content", "")))
                plain = len(str(pattern.get("String", "")))
                # A regular expression, or an empty text, also fits between two characters.
                growth *= max(1.0, length / plain) if plain else 1.0 + length
                growth = min(growth, 1e18)
    return growth


def decode(tokenizer: Any, ids: Any, **options: Any) -> str:
    """Return the text of tokens; see `bounded_tokenizer`."""
    # The library keeps the interpreter meanwhile, so the size of its memory is limited as well.
    with bounded_tokenizer(_DECODED_CHARS * len(ids)), bounded_work.limited_memory(_LEAST_BYTES):
        return str(tokenizer.decode(ids, **options))


class BoundedDecoder:
    """A tokenizer whose `decode` is bounded, for a library that calls it by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Any, **options: Any) -> str:
        return decode(self._tokenizer, ids, **options)

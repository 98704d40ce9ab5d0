"""Sentences about a check as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from app.text import count_of


def summarise_check(statuses: Sequence[str]) -> str:
    """Return how the checks ended; what is unknown is never counted as passed.

    >>> summarise_check(["pass", "fail", "pass", "unknown"])
    '4 checks: 2 passed, 1 failed, 1 unknown'
    >>> summarise_check(["pass", "warn", "warn"])
    '3 checks: 1 passed, 2 warnings'
    """
    number = Counter(statuses)
    parts = [f"{number['pass']} passed"]
    parts += [f"{number['fail']} failed"] if number["fail"] else []
    parts += [count_of(number["warn"], "warning")] if number["warn"] else []
    parts += [f"{number['unknown']} unknown"] if number["unknown"] else []
    return f"{count_of(len(statuses), 'check')}: {', '.join(parts)}"

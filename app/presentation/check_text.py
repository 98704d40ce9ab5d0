"""Sentences about a check as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from app.text import count_of


def summarise_part(statuses: Sequence[str], *, is_cancelled: bool) -> str:
    """Summarize a check that did not finish.

    >>> summarise_part(["pass", "fail"], is_cancelled=True)
    'The check was cancelled. The rows below were known by then. 2 checks: 1 passed, 1 failed.'
    >>> summarise_part([], is_cancelled=False)
    'The check broke off. No row was known by then.'
    """
    how = "The check was cancelled." if is_cancelled else "The check broke off."
    if not statuses:
        return f"{how} No row was known by then."
    return f"{how} The rows below were known by then. {summarise_check(statuses)}."


def summarise_check(statuses: Sequence[str]) -> str:
    """Summarize the results of checks; an unknown result never counts as passed.

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

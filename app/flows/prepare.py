"""Make a PC ready to train: the work left after its repairs, and the outcome in words."""

from __future__ import annotations

from collections.abc import Sequence

from app.provisioning.check_row import CheckRow
from app.text import count_of


def needs_environment(rows: Sequence[CheckRow]) -> bool:
    """Return whether a check found no training environment that fits.

    >>> from app.provisioning.check_row import make_row
    >>> needs_environment([make_row("environment", "big", "fail", "there is none yet")])
    True
    """
    return any(row.check == "environment" and row.status == "fail" for row in rows)


def count_failures(rows: Sequence[CheckRow]) -> int:
    """Return how many rows keep a PC from training."""
    return sum(row.status == "fail" for row in rows)


def describe_end(name: str, rows: Sequence[CheckRow], *, is_changed: bool) -> str:
    """Return whether a PC is ready now.

    >>> from app.provisioning.check_row import make_row
    >>> describe_end("big", [make_row("disk", "big", "fail", "full")], is_changed=True)
    'big is not ready: 1 problem left'
    >>> describe_end("big", [], is_changed=False)
    'big is ready to train; nothing to do'
    """
    if failures := count_failures(rows):
        return f"{name} is not ready: {count_of(failures, 'problem')} left"
    return f"{name} is ready to train" + ("" if is_changed else "; nothing to do")

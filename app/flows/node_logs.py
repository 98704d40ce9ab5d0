"""Logs of a node as one text with a heading each, the newest last, where the view scrolls to."""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.node import LogTail
from app.text import count_of, show_bytes, show_moment


def join_tails(tails: Sequence[LogTail], now_s: float) -> str:
    """Return the text of all logs, each under a heading."""
    parts = []
    for tail in reversed(tails):
        written = show_moment(tail.written_s, now_s)
        head = f"== {tail.run_id}, attempt {tail.attempt}, {tail.name}, written {written} =="
        text = tail.text if tail.text.endswith("\n") else f"{tail.text}\n"
        parts.append(f"{head}\n{text}")
    return "\n".join(parts)


def summarise(name: str, tails: Sequence[LogTail]) -> str:
    """Describe which logs there are.

    >>> summarise("alpha", [])
    'No logs on alpha yet.'
    """
    if not tails:
        return f"No logs on {name} yet."
    whole = show_bytes(sum(tail.size_bytes for tail in tails))
    return (
        f"The last lines of {count_of(len(tails), 'log')} on {name} ({whole} in total), newest "
        "last."
    )

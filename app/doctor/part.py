"""One part of a report: a file and its description in the table of contents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PART_BYTES = 256 << 10
"""Maximum size of one part, in bytes; of a longer one the end is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPart:
    name: str
    """File in the archive, such as `nodes/alpha.json`."""
    what: str
    """Description in a few words."""
    text: str


def json_part(name: str, what: str, value: object) -> ReportPart:
    """Return a part that holds a plain value as JSON."""
    return ReportPart(name=name, what=what, text=json.dumps(value, indent=1, default=str) + "\n")


def problem_part(name: str, what: str, problem: str) -> ReportPart:
    """Return a part that says why its content is missing, which is often the answer."""
    return ReportPart(name=name, what=f"{what}: not available", text=f"not available: {problem}\n")


def absent_part(name: str, what: str) -> ReportPart:
    """Return a part about something that nothing has been stored of so far, which is no fault."""
    return ReportPart(name=name, what=f"{what}: none stored yet", text="none stored yet\n")


def keep_end(text: str) -> str:
    """Return the whole lines at the end of a text that fit into a part.

    The first line is dropped with what is cut: half a secret would not be recognised as one.
    """
    data = text.encode("utf-8")
    if len(data) <= MAX_PART_BYTES:
        return text
    return data[-MAX_PART_BYTES:].partition(b"\n")[2].decode("utf-8", "replace")


def list_parts(parts: Sequence[ReportPart]) -> str:
    """Return the contents of a report as lines of name, size and meaning."""
    return "\n".join(f"{part.name}  ({len(part.text):,} characters): {part.what}" for part in parts)

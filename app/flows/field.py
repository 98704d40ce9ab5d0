"""One question of a form, as data: the window draws it, the tests read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal["text", "path", "choice", "nodes", "tick"]

YES, NO = "true", "false"
"""The answers of a tick, written as in a run file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    key: str
    section: str
    label: str
    help: str
    """What it means and what a good value is, in one or two sentences."""
    kind: FieldKind = "text"
    choices: tuple[tuple[str, str], ...] = ()
    """(value, what the person reads)."""
    placeholder: str = ""
    unit: str = ""
    is_wide: bool = False
    """Takes a line of its own; others share one with a neighbour."""
    advanced: bool = False
    """Stands in the part that is folded away."""

"""One question of a form, as data: the window draws it, the tests read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal["text", "path", "choice", "nodes", "tick"]

YES, NO = "true", "false"
"""Answers of a checkbox, written as in a run file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    key: str
    section: str
    label: str
    help: str
    """Meaning and a good value, in one or two sentences."""
    kind: FieldKind = "text"
    choices: tuple[tuple[str, str], ...] = ()
    """Choices, each as (value, label)."""
    placeholder: str = ""
    unit: str = ""
    is_wide: bool = False
    """Whether the field takes a whole line; others share one with a neighbour."""
    advanced: bool = False
    """Whether the field is in the collapsed Advanced section."""

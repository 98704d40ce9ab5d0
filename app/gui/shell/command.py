"""One row of the command palette: how it reads, and what choosing it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.flows.palette import Entry


@dataclass(frozen=True, slots=True)
class Command:
    entry: Entry
    act: Callable[[], object]
    """Runs on the Qt thread, after the palette has closed."""

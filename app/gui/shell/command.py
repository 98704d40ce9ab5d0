"""One row of the command palette: its text, and the action that runs when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.flows.palette import PaletteEntry


@dataclass(frozen=True, slots=True)
class Command:
    entry: PaletteEntry
    act: Callable[[], object]
    """Runs on the Qt thread, after the palette has closed."""

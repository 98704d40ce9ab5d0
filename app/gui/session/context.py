"""The services that every page and dialog receives, in one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.gui.kit.theme import Theme
from app.gui.session.bridge import Bridge
from app.gui.session.export_board import ExportBoard
from app.gui.session.live_state import LiveState
from app.gui.session.preferences import Preferences


@dataclass(frozen=True, slots=True)
class Context:
    bridge: Bridge
    cluster: LiveState
    theme: Theme
    exports: ExportBoard = field(default_factory=ExportBoard)
    """Running exports, and drafts of export wizards that were closed."""
    preferences: Preferences = field(default_factory=Preferences)
    """The settings; defaults where there is no home."""
    home: Path | None = None
    """Where this PC keeps nodes, runs and settings; None: nowhere."""

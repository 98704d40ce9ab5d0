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
    """Current settings; the defaults if nothing is stored."""
    home: Path | None = None
    """Folder of this PC's nodes, runs and settings; None if nothing is stored."""

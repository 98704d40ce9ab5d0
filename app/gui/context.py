"""What every page and dialog is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.gui.bridge import Bridge
from app.gui.cluster import Cluster
from app.gui.exports import ExportBoard
from app.gui.preferences import Preferences
from app.gui.theme import Theme


@dataclass(frozen=True, slots=True)
class Context:
    bridge: Bridge
    cluster: Cluster
    theme: Theme
    exports: ExportBoard = field(default_factory=ExportBoard)
    """What is exported now, or was asked for and left."""
    preferences: Preferences = field(default_factory=Preferences)
    """What the person chose; without a home: the defaults."""
    home: Path | None = None
    """Where this PC keeps nodes, runs and settings; None: nowhere."""

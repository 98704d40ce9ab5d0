"""What every page and dialog is given."""

from __future__ import annotations

from dataclasses import dataclass

from app.gui.bridge import Bridge
from app.gui.cluster import Cluster
from app.gui.theme import Theme


@dataclass(frozen=True, slots=True)
class Context:
    bridge: Bridge
    cluster: Cluster
    theme: Theme

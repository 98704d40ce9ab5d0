"""One named curve of a plot, told apart by its colour and by its dashes."""

from __future__ import annotations

from dataclasses import dataclass, field

from PySide6.QtCore import Qt

from app.gui.charts.curves import Curves

COLORS = ("chart_utilisation", "chart_temperature", "chart_tokens", "chart_memory")
"""Of several curves in one plot, in their order."""
PATTERNS = (
    Qt.PenStyle.SolidLine,
    Qt.PenStyle.DashLine,
    Qt.PenStyle.DotLine,
    Qt.PenStyle.DashDotLine,
)


@dataclass(slots=True)
class LineSeries:
    name: str
    color: str
    """Name of a colour of the palette."""
    pattern: Qt.PenStyle = Qt.PenStyle.SolidLine
    curves: Curves = field(default_factory=Curves)


def choose_style(place: int) -> tuple[str, Qt.PenStyle]:
    """Return colour and dashes of the `place`-th of several lines: no two of 16 are alike."""
    return COLORS[place % len(COLORS)], PATTERNS[(place + place // len(COLORS)) % len(PATTERNS)]

"""A named line of a plot, distinguished by colour and dash pattern."""

from __future__ import annotations

from dataclasses import dataclass, field

from PySide6.QtCore import Qt

from app.gui.charts.curves import Curves

COLORS = ("chart_utilisation", "chart_temperature", "chart_tokens", "chart_memory")
"""Colours of the first, second, ... line of a plot, as names in the palette."""
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
    """Name of a colour in the palette."""
    pattern: Qt.PenStyle = Qt.PenStyle.SolidLine
    curves: Curves = field(default_factory=Curves)


def choose_style(place: int) -> tuple[str, Qt.PenStyle]:
    """Return colour and dash pattern of line number `place`; the first 16 all differ."""
    # The patterns shift by one with each round of colours, so no pair repeats before the 17th.
    return COLORS[place % len(COLORS)], PATTERNS[(place + place // len(COLORS)) % len(PATTERNS)]

"""Lines through hundreds of points for the price of one call: numpy writes into Qt's own memory.

A list of QPointF costs five times as much. Pens are cosmetic and exactly one device pixel wide: in
Qt's raster engine width 2 costs four times, width 2 with antialiasing thirteen times as much.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import shiboken6
from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen, QPolygonF

from app.telemetry.history import Array, finite_parts


def make_polygon(x: Array, y: Array) -> QPolygonF:
    """Return the points (x, y) in pixels as a polygon."""
    polygon = QPolygonF()
    polygon.resize(len(x))
    if len(x):
        memory: Any = shiboken6.VoidPtr(cast(Any, polygon.data()), len(x) * 16, True)  # type: ignore[call-arg]
        points = np.frombuffer(memory, np.float64).reshape(-1, 2)
        points[:, 0] = x
        points[:, 1] = y
    return polygon


def make_area(x: Array, y: Array, floor: float) -> QPolygonF:
    """Return the area between the line and `floor` as a polygon."""
    xs = np.concatenate(([x[0]], x, [x[-1]]))
    return make_polygon(xs, np.concatenate(([floor], y, [floor])))


def paint_sparkline(
    painter: QPainter,
    area: QRectF,
    times: Array,
    values: Array,
    *,
    low: float,
    high: float,
    window_s: float,
    color: QColor,
) -> None:
    """Draw the last `window_s` seconds of `values`; the newest time is the right edge.

    Values outside [low, high] are drawn at the edge; a gap (NaN) stays empty.
    """
    if not len(times):
        return
    first = int(np.searchsorted(times, times[-1] - window_s))
    times, values = times[first:], values[first:]
    x = area.right() + (times - times[-1]) * (area.width() / window_s)
    share = (np.clip(values, low, high) - low) / ((high - low) or 1.0)
    y = area.bottom() - share * area.height()
    fill = QColor(color)
    fill.setAlpha(36)
    pen = QPen(color, 1)
    pen.setCosmetic(True)
    for part in finite_parts(y):
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QBrush(fill))
        painter.drawPolygon(make_area(x[part], y[part], area.bottom()))
        painter.setPen(pen)
        painter.drawPolyline(make_polygon(x[part], y[part]))

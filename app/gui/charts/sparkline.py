"""Draw lines through hundreds of points fast: numpy writes straight into Qt's polygons.

Building a list of QPointF takes five times as long. Pens are cosmetic and one device pixel wide: in
Qt's raster engine, width 2 takes four times as long, and thirteen times with antialiasing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import shiboken6
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QImage, QPainter, QPen, QPolygonF

from app.telemetry.history import Array, finite_parts

TINT = 36
"""Opacity of the area below a line, from 0 to 255."""


def make_polygon(x: Array, y: Array) -> QPolygonF:
    """Return the points (x, y) in pixels as a polygon."""
    polygon = QPolygonF()
    polygon.resize(len(x))
    if len(x):
        # A QPolygonF is a contiguous array of (x, y) doubles: 16 bytes a point.
        memory: Any = shiboken6.VoidPtr(cast(Any, polygon.data()), len(x) * 16, True)  # type: ignore[call-arg]
        points = np.frombuffer(memory, np.float64).reshape(-1, 2)
        points[:, 0] = x
        points[:, 1] = y
    return polygon


@dataclass(frozen=True, slots=True)
class Trace:
    """Where and how one row of values is drawn."""

    area: QRectF
    low: float
    high: float
    color: QColor


def paint_sparklines(
    painter: QPainter, traces: Sequence[Trace], times: Array, rows: Array, window_s: float
) -> None:
    """Draw the last `window_s` seconds of each row, the newest time at the right edge.

    `rows` has shape (len(traces), len(times)), and all areas have the same size, so that numpy
    computes all lines at once. Values outside a trace's limits are drawn at the edge; NaN is a gap.
    """
    if not len(times):
        return
    first = int(np.searchsorted(times, times[-1] - window_s))
    times, rows = times[first:], rows[:, first:]
    width, height = traces[0].area.width(), traces[0].area.height()
    x = width + (times - times[-1]) * (width / window_s)
    lows = np.array([[trace.low] for trace in traces])
    # Equal limits must not divide by zero.
    spans = np.array([[trace.high - trace.low or 1.0] for trace in traces])
    y = height - np.minimum(np.maximum((rows - lows) / spans, 0.0), 1.0) * height
    scale = painter.device().devicePixelRatio()
    images = _tint_below(traces, x, y, width, height, scale)
    for trace, image, line in zip(traces, images, y, strict=True):
        corner = trace.area.topLeft()
        painter.drawImage(corner, image)
        pen = QPen(trace.color, 1)
        pen.setCosmetic(True)
        painter.setPen(pen)
        for part in finite_parts(line):
            painter.drawPolyline(make_polygon(x[part] + corner.x(), line[part] + corner.y()))


def _tint_below(
    traces: Sequence[Trace], x: Array, y: Array, width: float, height: float, scale: float
) -> Iterator[QImage]:
    """Yield an image of the tinted area below each line, in device pixels.

    numpy fills it twenty times faster than the raster engine fills a polygon.
    """
    num_columns, num_rows = max(round(width * scale), 1), max(round(height * scale), 1)
    columns = np.arange(num_columns) / scale
    nearest = np.searchsorted(x, columns)
    tops = y[:, np.minimum(nearest, len(x) - 1)] * scale
    tops[:, columns < x[0]] = (
        np.inf
    )  # nothing before the first sample; comparing NaN is false anyway
    is_below = np.arange(num_rows)[None, :, None] >= tops[:, None, :]
    for trace, mask in zip(traces, is_below, strict=True):
        pixels = np.where(mask, _tint(trace.color.rgb()), np.uint32(0))
        image = QImage(
            pixels.tobytes(),
            num_columns,
            num_rows,
            num_columns * 4,
            QImage.Format.Format_ARGB32_Premultiplied,
        )
        image.setDevicePixelRatio(scale)
        yield image


@functools.cache
def _tint(rgb: int) -> np.uint32:
    """Return a colour with the opacity TINT, premultiplied."""
    parts = [round((rgb >> shift & 255) * TINT / 255) for shift in (16, 8, 0)]
    return np.uint32(TINT << 24 | parts[0] << 16 | parts[1] << 8 | parts[2])

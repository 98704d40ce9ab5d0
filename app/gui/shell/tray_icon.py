"""Draw the tray icon: the logo, a ring for the progress of runs, a badge for a problem.

State shows in shape, not in colour alone: no ring is idle, an arc is progress, a triangle is a
warning, a cross in a disc is an error.
"""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QIcon, QPainter, QPen, QPixmap, QPolygonF

from app.gui.kit.theme import Theme
from app.telemetry.whole import Whole

SIZE_PX = 64
RING_PX = 8.0
BADGE_PX = 34.0
STEPS = 20
"""Number of steps of the ring; few, so that the icon is seldom sent to the desktop."""

# The panel may be light or dark independently of the window, so no theme applies.
_TRACK, _DONE = QColor(128, 128, 140, 110), QColor("#4f7bff")
_WARNING, _ERROR, _EDGE = QColor("#e8a100"), QColor("#d93a3a"), QColor("#ffffff")


def picture_key(whole: Whole) -> tuple[str, int | None]:
    """Return the values that the icon depends on; equal keys mean equal icons."""
    badge = whole.tone if whole.tone in ("warning", "error") else ""
    return badge, None if whole.share is None else round(whole.share * STEPS)


def draw_tray_icon(theme: Theme, whole: Whole) -> QIcon:
    """Return the icon for the state of all nodes and runs."""
    badge, step = picture_key(whole)
    pixmap = QPixmap(SIZE_PX, SIZE_PX)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    area = QRectF(pixmap.rect())
    inset = 0.0 if step is None else RING_PX + 5
    mark = round(SIZE_PX - 2 * inset)
    painter.drawPixmap(QPointF(inset, inset), theme.pixmap("rackless", "text", mark))
    if step is not None:
        ring = area.adjusted(RING_PX / 2, RING_PX / 2, -RING_PX / 2, -RING_PX / 2)
        painter.setPen(QPen(_TRACK, RING_PX))
        painter.drawEllipse(ring)
        pen = QPen(_DONE, RING_PX)
        pen.setCapStyle(Qt.PenCapStyle.FlatCap)
        painter.setPen(pen)
        # Qt counts in sixteenths of a degree, anticlockwise from three o'clock.
        # At least one step, so that a run that has just started shows an arc.
        painter.drawArc(ring, 90 * 16, -round(360 * 16 * max(step, 1) / STEPS))
    if badge:
        corner = QRectF(SIZE_PX - BADGE_PX, SIZE_PX - BADGE_PX, BADGE_PX, BADGE_PX)
        (_draw_cross if badge == "error" else _draw_triangle)(painter, corner)
    painter.end()
    return QIcon(pixmap)


def _draw_triangle(painter: QPainter, area: QRectF) -> None:
    inner = area.adjusted(3, 3, -3, -3)
    top = QPointF(inner.center().x(), inner.top())
    painter.setPen(QPen(_EDGE, 4, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    painter.setBrush(_WARNING)
    painter.drawPolygon(QPolygonF([top, inner.bottomRight(), inner.bottomLeft()]))


def _draw_cross(painter: QPainter, area: QRectF) -> None:
    painter.setPen(QPen(_EDGE, 3))
    painter.setBrush(_ERROR)
    painter.drawEllipse(area.adjusted(2, 2, -2, -2))
    arm = area.adjusted(12, 12, -12, -12)
    painter.setPen(QPen(_EDGE, 4, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    painter.drawLine(arm.topLeft(), arm.bottomRight())
    painter.drawLine(arm.topRight(), arm.bottomLeft())

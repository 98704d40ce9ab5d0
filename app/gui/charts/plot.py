"""A curve over steps with axes, readout under the mouse, zoom and pan: quick with a million points.

Painted from at most two points per pixel column (smallest and largest: no peak is lost). The wheel
zooms, dragging pans, a double click or Home shows all again; arrow keys and +/- do the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import (
    QColor,
    QFontMetricsF,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QWheelEvent,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.gui.charts.axis import choose_ticks, write_tick
from app.gui.charts.curves import Curves, Piece
from app.gui.charts.limits import Limits, fit_values
from app.gui.charts.sparkline import make_polygon
from app.gui.theme import Theme
from app.telemetry.history import finite_parts
from app.text import DASH

LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 52, 14, 34, 26
FINE_POINTS = 1500
"""Up to so many points a line may be wider than one pixel of the screen."""
LEAST_SPAN = 4.0
"""Steps that stay visible at the deepest zoom."""


class Plot(QWidget):
    """One quantity of a run over its steps, one line per attempt."""

    def __init__(
        self, theme: Theme, title: str, color: str, write: Callable[[float | None], str]
    ) -> None:
        super().__init__()
        self._theme, self._title, self._color, self._write = theme, title, color, write
        self._from_zero = False
        self.curves = Curves()
        self._view: Limits | None = None
        self._hover: float | None = None
        self._drag: tuple[float, Limits] | None = None
        self.setMinimumHeight(180)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(title)
        self.setToolTip("")
        theme.changed.connect(self.update)

    def start_at_zero(self) -> None:
        """Let the scale begin at 0, for speeds."""
        self._from_zero = True

    def clear(self) -> None:
        self.curves.clear()
        self._view = self._hover = None
        self.update()

    def extend(self, attempt: int, steps: list[float], values: list[float]) -> None:
        """Add points of an attempt; unknown values are NaN."""
        self.curves.extend(attempt, steps, values)
        if not steps:
            return
        latest = values[-1]
        shown = self._write(None if np.isnan(latest) else latest)
        self.setAccessibleDescription(f"{shown} at step {steps[-1]:,.0f}")
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(420, 220)

    # ------------------------------------------------------------ what is shown

    def visible(self) -> Limits:
        """Return the steps in view: all, or what was zoomed to."""
        return self._view or self.curves.whole()

    def show_range(self, view: Limits | None) -> None:
        """Show these steps; None: all, and what is to come."""
        whole = self.curves.whole()
        self._view = view.inside(whole, LEAST_SPAN) if view is not None else None
        if self._view is not None and self._view.span >= whole.span * 0.999:
            self._view = None
        self.update()

    def _area(self) -> QRectF:
        return QRectF(
            LEFT_PX,
            TOP_PX,
            max(self.width() - LEFT_PX - RIGHT_PX, 1),
            max(self.height() - TOP_PX - BOTTOM_PX, 1),
        )

    def _value_limits(self, pieces: list[Piece]) -> Limits:
        values = np.concatenate([piece.y for piece in pieces]) if pieces else np.empty(0)
        return fit_values(values, from_zero=self._from_zero)

    # ------------------------------------------------------------ painting

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        area, view = self._area(), self.visible()
        self._paint_title(painter)
        if not len(self.curves):
            painter.setPen(self._theme.palette.color("muted"))
            painter.setFont(self._theme.font(13))
            painter.drawText(area, int(Qt.AlignmentFlag.AlignCenter), "No figures yet")
            return
        pieces = self.curves.visible(view, max(int(area.width()), 16))
        scale = self._value_limits(pieces)
        self._paint_axes(painter, area, view, scale)
        painter.save()
        painter.setClipRect(area.adjusted(0, -1, 0, 1))
        for piece in pieces:
            self._paint_piece(painter, area, view, scale, piece)
        painter.restore()
        self._paint_marks(painter, area, view)
        if self._hover is not None:
            self._paint_hover(painter, area, view, scale)

    def _paint_title(self, painter: QPainter) -> None:
        painter.setFont(self._theme.font(13, 600))
        painter.setPen(self._theme.palette.color("text"))
        line = QRectF(14, 8, self.width() - 28, 18)
        painter.drawText(line, int(Qt.AlignmentFlag.AlignVCenter), self._title)
        if self._view is not None:
            painter.setFont(self._theme.font(12))
            painter.setPen(self._theme.palette.color("muted"))
            side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(line, int(side), "zoomed \u00b7 double click shows all")

    def _paint_axes(self, painter: QPainter, area: QRectF, view: Limits, scale: Limits) -> None:
        colors = self._theme.palette
        painter.setFont(self._theme.font(11))
        rows = choose_ticks(scale, max(2, int(area.height() // 44)))
        step = rows[1] - rows[0] if len(rows) > 1 else 1.0
        for value in rows:
            y = round(area.bottom() - (value - scale.low) / scale.span * area.height()) + 0.5
            painter.setPen(QPen(colors.color("chart_grid"), 1))
            painter.drawLine(QPointF(area.left(), y), QPointF(area.right(), y))
            painter.setPen(colors.color("muted"))
            label = QRectF(0, y - 9, LEFT_PX - 8, 18)
            side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(label, int(side), write_tick(value, step))
        columns = choose_ticks(view, max(2, int(area.width() // 90)))
        step = columns[1] - columns[0] if len(columns) > 1 else 1.0
        for value in columns:
            x = area.left() + (value - view.low) / view.span * area.width()
            text = write_tick(value, step)
            width = QFontMetricsF(painter.font()).horizontalAdvance(text) + 4
            left = min(max(x - width / 2, area.left() - 8), self.width() - width - 2)
            label = QRectF(left, area.bottom() + 5, width, 16)
            painter.drawText(label, int(Qt.AlignmentFlag.AlignCenter), text)

    def _paint_piece(
        self, painter: QPainter, area: QRectF, view: Limits, scale: Limits, piece: Piece
    ) -> None:
        x, y = piece.x, piece.y
        color = "chart_muted" if piece.is_lost else self._color
        px = area.left() + (x - view.low) / view.span * area.width()
        share = np.clip((y - scale.low) / scale.span, -0.02, 1.02)
        py = area.bottom() - share * area.height()
        pen = QPen(self._theme.palette.color(color), 1 if len(px) > FINE_POINTS else 1.4)
        pen.setCosmetic(len(px) > FINE_POINTS)  # see sparkline.py: a wide pen costs much more
        painter.setPen(pen)
        for part in finite_parts(py):
            if part.stop - part.start == 1:
                painter.drawEllipse(QPointF(px[part.start], py[part.start]), 1.5, 1.5)
            else:
                painter.drawPolyline(make_polygon(px[part], py[part]))

    def _paint_marks(self, painter: QPainter, area: QRectF, view: Limits) -> None:
        colors = self._theme.palette
        painter.setFont(self._theme.font(11))
        for mark in self.curves.marks:
            if not view.low <= mark.x <= view.high:
                continue
            x = round(area.left() + (mark.x - view.low) / view.span * area.width()) + 0.5
            painter.setPen(QPen(colors.color("border_strong"), 1, Qt.PenStyle.DashLine))
            painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
            painter.setPen(colors.color("muted"))
            width = QFontMetricsF(painter.font()).horizontalAdvance(mark.text)
            left = x + 5 if x + 5 + width < area.right() else x - 5 - width
            ground = QColor(colors.color("surface"))
            ground.setAlphaF(0.85)  # the words stay readable where the curve passes behind them
            painter.fillRect(QRectF(left - 2, area.top() - 1, width + 4, 15), ground)
            painter.drawText(QPointF(left, area.top() + 10), mark.text)

    def _paint_hover(self, painter: QPainter, area: QRectF, view: Limits, scale: Limits) -> None:
        found = self.curves.value_at(self._hover or 0.0)
        if found is None:
            return
        step, value, attempt = found
        colors = self._theme.palette
        x = round(area.left() + (step - view.low) / view.span * area.width()) + 0.5
        painter.setPen(QPen(colors.color("border_strong"), 1))
        painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
        shown = DASH if np.isnan(value) else self._write(value)
        text = f"step {step:,.0f}   {shown}"
        if len(self.curves.attempts) > 1:
            text += f"   attempt {attempt}"
        painter.setFont(self._theme.font(12, 500))
        width = QFontMetricsF(painter.font()).horizontalAdvance(text) + 16
        left = x + 8 if x + 8 + width < area.right() else x - 8 - width
        box = QRectF(max(left, 4), area.top() + 14, width, 24)
        painter.setBrush(colors.color("surface"))
        painter.drawRoundedRect(box, 6, 6)
        painter.setPen(colors.color("text"))
        painter.drawText(box, int(Qt.AlignmentFlag.AlignCenter), text)
        if np.isfinite(value):
            y = area.bottom() - (value - scale.low) / scale.span * area.height()
            painter.setBrush(colors.color(self._color))
            painter.setPen(Qt.PenStyle.NoPen)
            painter.drawEllipse(QPointF(x, min(max(y, area.top()), area.bottom())), 3.5, 3.5)

    # ------------------------------------------------------------ people

    def _step_at(self, x_px: float) -> float:
        area, view = self._area(), self.visible()
        return view.low + (x_px - area.left()) / area.width() * view.span

    def wheelEvent(self, event: QWheelEvent) -> None:
        turns = event.angleDelta().y() / 120
        if turns:
            around = self._step_at(event.position().x())
            self.show_range(self.visible().zoomed(0.8**turns, around))
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._drag = (event.position().x(), self.visible())
            self.setCursor(Qt.CursorShape.ClosedHandCursor)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        x = event.position().x()
        if self._drag is not None:
            start_px, view = self._drag
            self.show_range(view.moved((start_px - x) / self._area().width() * view.span))
        self._hover = self._step_at(x)
        self.update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        self._drag = None
        self.unsetCursor()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.show_range(None)

    def leaveEvent(self, event: QEvent) -> None:
        self._hover = None
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        view = self.visible()
        middle = (view.low + view.high) / 2
        moves = {
            Qt.Key.Key_Left: view.moved(-view.span * 0.1),
            Qt.Key.Key_Right: view.moved(view.span * 0.1),
            Qt.Key.Key_Plus: view.zoomed(0.8, middle),
            Qt.Key.Key_Equal: view.zoomed(0.8, middle),
            Qt.Key.Key_Minus: view.zoomed(1.25, middle),
            Qt.Key.Key_Home: None,
        }
        key = Qt.Key(event.key())
        if key in moves:
            self.show_range(moves[key])
        else:
            super().keyPressEvent(event)

"""A chart of values over training steps, with readout, zoom and pan; fast with a million points.

It paints at most two points per pixel column, the smallest and the largest, so that no peak is
lost. The wheel zooms, dragging pans, a double click shows everything; `keys.py` does the same from
the keyboard. The context menu opens the values as a table, and copies them or the picture.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PySide6.QtCore import QEvent, QPointF, QSize, Qt, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QFocusEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QWheelEvent,
)
from PySide6.QtWidgets import QApplication, QMenu, QSizePolicy, QWidget

from app.gui.charts.curves import Curves, Piece
from app.gui.charts.frame import (
    Frame,
    area_of,
    paint_axes,
    paint_legend,
    paint_marks,
    paint_readout,
    paint_title,
)
from app.gui.charts.keys import handle_key
from app.gui.charts.limits import Limits, fit_values
from app.gui.charts.line import LineSeries
from app.gui.charts.reading import describe_readings, next_step, read_lines
from app.gui.charts.sparkline import make_polygon
from app.gui.charts.table import format_table
from app.gui.kit.primitives import set_tooltip
from app.gui.kit.theme import Theme
from app.telemetry.history import finite_parts

FINE_POINTS = 1500
"""Number of points above which a line is one device pixel wide and solid, to stay fast."""
MIN_HEIGHT_PX = 110
MIN_SPAN = 4.0
"""Minimum range that zooming reaches, in steps."""


class Plot(QWidget):
    """One quantity over the steps of a run, one curve per attempt; or one line per run or GPU."""

    view_changed = Signal(object)
    """The steps in view changed: their Limits, or None for all."""

    def __init__(
        self, theme: Theme, title: str, color: str, write: Callable[[float | None], str]
    ) -> None:
        super().__init__()
        self._theme, self.title, self._write = theme, title, write
        self._from_zero = False
        self.shows_marks = True
        """True if the attempts of the first line are marked."""
        self.lines = [LineSeries(title, color)]
        self._view: Limits | None = None
        self._hover: float | None = None
        # Where a drag began: x in pixels, and the view at that time.
        self._drag: tuple[float, Limits] | None = None
        self.setMinimumHeight(MIN_HEIGHT_PX)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(title)
        set_tooltip(self, "")
        theme.changed.connect(self.update)

    @property
    def curves(self) -> Curves:
        """The curves of the first line."""
        return self.lines[0].curves

    def start_at_zero(self) -> None:
        """Start the y axis at 0, as for speeds."""
        self._from_zero = True

    def show_lines(self, lines: list[LineSeries]) -> None:
        """Replace the lines; at least one is needed."""
        self.lines = lines
        self._view = self._hover = None
        self.update()

    def clear(self) -> None:
        for line in self.lines:
            line.curves.clear()
        self._view = self._hover = None
        self.update()

    def extend(
        self, attempt: int, steps: list[float], values: list[float], *, line: int = 0
    ) -> None:
        """Add points of an attempt; unknown values are NaN."""
        self.lines[line].curves.extend(attempt, steps, values)
        if not steps:
            return
        if line == 0 and (
            self._hover is None or not self.hasFocus()
        ):  # else it would interrupt reading
            latest = values[-1]
            shown = self._write(None if np.isnan(latest) else latest)
            self.setAccessibleDescription(f"{shown} at step {steps[-1]:,.0f}")
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(420, 220)

    # ------------------------------------------------------------ range in view

    def full_range(self) -> Limits:
        """Return the range of the steps of all lines."""
        parts = [line.curves.full_range() for line in self.lines if len(line.curves)]
        if not parts:
            return Limits(0.0, 1.0)
        return Limits(min(one.low for one in parts), max(one.high for one in parts))

    @property
    def zoomed_to(self) -> Limits | None:
        """The range that was zoomed to; None while everything is shown."""
        return self._view

    def visible(self) -> Limits:
        """Return the range of steps in view."""
        return self._view or self.full_range()

    def show_range(self, view: Limits | None) -> None:
        """Show a range of steps; None for all, growing with new ones."""
        whole, before = self.full_range(), self._view
        self._view = view.inside(whole, MIN_SPAN) if view is not None else None
        if self._view is not None and self._view.span >= whole.span * 0.999:
            self._view = None  # zoomed out entirely: follow new steps again
        if self._view != before:
            self.view_changed.emit(self._view)
            self.update()

    # ------------------------------------------------------------ painting

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        area, view = area_of(self.width(), self.height()), self.visible()
        zoomed = self._view is not None and len(self.lines) == 1
        note = "zoomed \u00b7 double-click to show all" if zoomed else ""
        paint_title(painter, self._theme, self.title, note, self.width())
        if len(self.lines) > 1:
            left = 28 + painter.fontMetrics().horizontalAdvance(self.title)
            paint_legend(painter, self._theme, self.lines, left, self.width() - 14)
        if not any(len(line.curves) for line in self.lines):
            painter.setPen(self._theme.palette.color("muted"))
            painter.setFont(self._theme.font(13))
            painter.drawText(area, int(Qt.AlignmentFlag.AlignCenter), "No data yet")
            return
        num_columns = max(int(area.width()), 16)
        pieces = [(line, line.curves.visible(view, num_columns)) for line in self.lines]
        values = [piece.y for _, parts in pieces for piece in parts]
        scale = fit_values(
            np.concatenate(values) if values else np.empty(0), from_zero=self._from_zero
        )
        frame = Frame(area, view, scale)
        paint_axes(painter, self._theme, frame, self.width())
        painter.save()
        painter.setClipRect(area.adjusted(0, -1, 0, 1))
        for line, parts in pieces:
            for piece in parts:
                self._paint_piece(painter, frame, line, piece)
        painter.restore()
        paint_marks(painter, self._theme, frame, self.curves.marks if self.shows_marks else ())
        self._paint_readout(painter, frame)

    def _paint_piece(self, painter: QPainter, frame: Frame, line: LineSeries, piece: Piece) -> None:
        area, view, scale = frame.area, frame.view, frame.scale
        color = "chart_muted" if piece.is_lost else line.color
        px = area.left() + (piece.x - view.low) / view.span * area.width()
        # Values beyond the scale end just outside the clip area, not at pixel 10^6.
        share = np.clip((piece.y - scale.low) / scale.span, -0.02, 1.02)
        py = area.bottom() - share * area.height()
        is_fine = len(px) > FINE_POINTS
        pen = QPen(self._theme.palette.color(color), 1 if is_fine else 1.4)
        pen.setCosmetic(is_fine)  # wide pens and dashes are slow, see sparkline.py
        if not is_fine:
            pen.setStyle(line.pattern)
        painter.setPen(pen)
        for part in finite_parts(py):
            if part.stop - part.start == 1:
                # A line through one point would be invisible.
                painter.drawEllipse(QPointF(px[part.start], py[part.start]), 1.5, 1.5)
            else:
                painter.drawPolyline(make_polygon(px[part], py[part]))

    def _paint_readout(self, painter: QPainter, frame: Frame) -> None:
        if self._hover is not None:
            at, readings = read_lines(self.lines, self._hover, self._write)
            if at is not None:
                paint_readout(painter, self._theme, frame, at, readings)

    # ------------------------------------------------------------ copying

    def copy_picture(self) -> None:
        """Copy the plot as a picture."""
        QApplication.clipboard().setPixmap(self.grab())

    def copy_figures(self) -> None:
        """Copy every point in view as tab-separated columns."""
        QApplication.clipboard().setText(format_table(self.lines, self.visible()))

    def show_table(self) -> None:
        """Open the points in view as a table."""
        from app.gui.charts.figures_dialog import FiguresDialog

        title = self.accessibleName()
        FiguresDialog(self._theme, self, title, self.lines, self.visible(), self._write).open()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = QMenu(self)
        menu.addAction("Show as table\tEnter", self.show_table)
        menu.addSeparator()
        menu.addAction("Copy picture", self.copy_picture)
        menu.addAction("Copy values as text", self.copy_figures)
        menu.addSeparator()
        menu.addAction("Show all", lambda: self.show_range(None)).setEnabled(self._view is not None)
        # A popup menu is not deleted by closing it.
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(event.globalPos())

    # ------------------------------------------------------------ mouse and keyboard

    def _step_at(self, x_px: float) -> float:
        area, view = area_of(self.width(), self.height()), self.visible()
        return view.low + (x_px - area.left()) / area.width() * view.span

    def wheelEvent(self, event: QWheelEvent) -> None:
        turns = event.angleDelta().y() / 120
        if turns:
            around = self._step_at(event.position().x())
            self.show_range(self.visible().zoomed(0.8**turns, around))
        event.accept()  # or the page around the chart would scroll

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._drag = (event.position().x(), self.visible())
            self.setCursor(Qt.CursorShape.ClosedHandCursor)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        x = event.position().x()
        if self._drag is not None:
            start_px, view = self._drag
            self.show_range(
                view.moved(
                    (start_px - x) / area_of(self.width(), self.height()).width() * view.span
                )
            )
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
        if not handle_key(self, event):
            super().keyPressEvent(event)

    def step_readout(self, direction: int) -> None:
        """Move the readout to the next point right (1) or left (-1), and announce it.

        The next point is at least one pixel away: a key press always shows a change.
        """
        view = self.visible()
        gap = view.span / area_of(self.width(), self.height()).width() * direction
        start = self._hover
        if start is None:
            start = (view.low if direction > 0 else view.high) - gap
        found = next_step(self.lines, start, gap)
        if found is None:
            return
        if not view.low <= found <= view.high:
            self.show_range(view.moved(found - (view.high if direction > 0 else view.low)))
        self._hover = found
        self.setAccessibleDescription(
            describe_readings(read_lines(self.lines, found, self._write)[1])
        )
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        self._hover = None
        super().focusOutEvent(event)
        self.update()

"""Paint the surroundings of a plot's curves: title, axes, legend, marks and readout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QFontMetricsF, QPainter, QPen

from app.gui.charts.curves import Mark
from app.gui.charts.limits import Limits
from app.gui.charts.line import LineSeries
from app.gui.charts.reading import ChartReading
from app.gui.kit.theme import Theme
from app.text import show_exponent


def choose_ticks(limits: Limits, num_wanted: int) -> list[float]:
    """Return about `num_wanted` round values inside `limits`, at most one more.

    They are 1, 2 or 5 times a power of ten apart.

    >>> choose_ticks(Limits(0.0, 10.0), 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = limits.high - limits.low
    if not 0 < span < math.inf or num_wanted < 1:
        return []
    raw = span / num_wanted
    power = 10.0 ** math.floor(math.log10(raw))
    # The tolerance accepts a span that is round but for the last bits of its float.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(limits.low / step - 1e-9)
    last = math.floor(limits.high / step + 1e-9)
    # 12 digits: 3 * 0.1 is 0.30000000000000004, which would show
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def format_tick(value: float, step: float) -> str:
    """Return the label of a tick, with as many digits as ticks `step` apart need.

    >>> format_tick(1.5, 0.5), format_tick(2000.0, 500.0), format_tick(25000.0, 5000.0)
    ('1.5', '2,000', '25 k')
    >>> format_tick(0.0, 2e-7), format_tick(4e-7, 2e-7), format_tick(1.5e-4, 5e-5)
    ('0', '4e-7', '1.5e-4')
    """
    if step < 1e-4 or abs(value) >= 1e7:  # longer texts do not fit next to a plot
        return show_exponent(value) if value else "0"
    if abs(value) >= 10_000 and step >= 1000:
        return f"{value / 1000:,.0f} k"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 52, 14, 34, 26
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
# Length of the sample line next to a name in the legend, in pixels.
_SAMPLE_PX = 18


@dataclass(frozen=True, slots=True)
class Frame:
    """Area of the curves and the ranges that it shows."""

    area: QRectF
    view: Limits
    """Steps in view, along x."""
    scale: Limits
    """Range of values, along y."""

    def x_of(self, step: float) -> float:
        """Return the x of a step, in pixels."""
        share = (step - self.view.low) / self.view.span
        return self.area.left() + share * self.area.width()

    def y_of(self, value: float) -> float:
        """Return the y of a value, in pixels."""
        share = (value - self.scale.low) / self.scale.span
        return self.area.bottom() - share * self.area.height()


def area_of(width: float, height: float) -> QRectF:
    """Return the area of the curves in a plot of this size, in pixels."""
    return QRectF(
        LEFT_PX,
        TOP_PX,
        max(width - LEFT_PX - RIGHT_PX, 1),
        max(height - TOP_PX - BOTTOM_PX, 1),
    )


def elide(painter: QPainter, text: str, room_px: float) -> str:
    """Return `text` elided to `room_px` in the painter's font."""
    metrics = QFontMetricsF(painter.font())
    return metrics.elidedText(text, Qt.TextElideMode.ElideRight, max(room_px, 0.0))


def paint_title(painter: QPainter, theme: Theme, title: str, note: str, width: float) -> None:
    """Draw the title on the left, and a note on the right of the same line."""
    painter.setFont(theme.font(13, 600))
    painter.setPen(theme.palette.color("text"))
    line = QRectF(14, 8, width - 28, 18)
    shown = elide(painter, title, line.width())
    painter.drawText(line, int(Qt.AlignmentFlag.AlignVCenter), shown)
    if note:
        room = line.adjusted(painter.fontMetrics().horizontalAdvance(shown) + 16, 0, 0, 0)
        painter.setFont(theme.font(12))
        painter.setPen(theme.palette.color("muted"))
        painter.drawText(room, int(_RIGHT), elide(painter, note, room.width()))


def paint_legend(
    painter: QPainter, theme: Theme, lines: Sequence[LineSeries], left: float, right: float
) -> None:
    """Draw the names of the lines, aligned to `right`; those that would pass `left` are omitted."""
    painter.setFont(theme.font(12))
    metrics = QFontMetricsF(painter.font())
    # From the right, so the last name comes first.
    for line in reversed(lines):
        name = metrics.elidedText(line.name, Qt.TextElideMode.ElideRight, 180)
        width = metrics.horizontalAdvance(name)
        if right - width - _SAMPLE_PX - 6 < left:
            return
        painter.setPen(theme.palette.color("muted"))
        painter.drawText(QRectF(right - width, 8, width + 1, 18), int(_RIGHT), name)
        start = right - width - 6 - _SAMPLE_PX
        painter.setPen(QPen(theme.palette.color(line.color), 2, line.pattern))
        painter.drawLine(QPointF(start, 17.5), QPointF(start + _SAMPLE_PX, 17.5))
        right = start - 16


def paint_axes(painter: QPainter, theme: Theme, frame: Frame, width: float) -> None:
    """Draw the grid and the labels of both axes."""
    colors, area = theme.palette, frame.area
    painter.setFont(theme.font(11))
    rows = choose_ticks(frame.scale, max(2, int(area.height() // 44)))
    step = rows[1] - rows[0] if len(rows) > 1 else 1.0
    for value in rows:
        y = round(frame.y_of(value)) + 0.5  # the middle of a pixel: a hairline stays sharp
        painter.setPen(QPen(colors.color("chart_grid"), 1))
        painter.drawLine(QPointF(area.left(), y), QPointF(area.right(), y))
        painter.setPen(colors.color("muted"))
        painter.drawText(QRectF(0, y - 9, LEFT_PX - 8, 18), int(_RIGHT), format_tick(value, step))
    columns = choose_ticks(frame.view, max(2, int(area.width() // 90)))
    step = columns[1] - columns[0] if len(columns) > 1 else 1.0
    for value in columns:
        text = format_tick(value, step)
        wide = QFontMetricsF(painter.font()).horizontalAdvance(text) + 4
        left = min(max(frame.x_of(value) - wide / 2, area.left() - 8), width - wide - 2)
        label = QRectF(left, area.bottom() + 5, wide, 16)
        painter.drawText(label, int(Qt.AlignmentFlag.AlignCenter), text)


def paint_marks(painter: QPainter, theme: Theme, frame: Frame, marks: Sequence[Mark]) -> None:
    """Draw the marks in view as vertical lines with their text."""
    colors, area = theme.palette, frame.area
    painter.setFont(theme.font(11))
    for mark in marks:
        if not frame.view.low <= mark.x <= frame.view.high:
            continue
        x = round(frame.x_of(mark.x)) + 0.5
        painter.setPen(QPen(colors.color("border_strong"), 1, Qt.PenStyle.DashLine))
        painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
        painter.setPen(colors.color("muted"))
        width = QFontMetricsF(painter.font()).horizontalAdvance(mark.text)
        left = x + 5 if x + 5 + width < area.right() else x - 5 - width
        # A copy: the colours of the palette are cached and shared.
        ground = QColor(colors.color("surface"))
        ground.setAlphaF(0.85)  # keeps the text readable over a curve
        painter.fillRect(QRectF(left - 2, area.top() - 1, width + 4, 15), ground)
        painter.drawText(QPointF(left, area.top() + 10), mark.text)


def paint_readout(
    painter: QPainter, theme: Theme, frame: Frame, step: float, readings: Sequence[ChartReading]
) -> None:
    """Draw a line at `step`, a dot on each curve, and a box with their values."""
    colors, area = theme.palette, frame.area
    x = round(frame.x_of(step)) + 0.5
    painter.setPen(QPen(colors.color("border_strong"), 1))
    painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
    painter.setFont(theme.font(12, 500))
    metrics = QFontMetricsF(painter.font())
    width = max(metrics.horizontalAdvance(one.text) for one in readings) + 16
    left = x + 8 if x + 8 + width < area.right() else x - 8 - width
    box = QRectF(max(left, 4), area.top() + 14, width, 6 + 18 * len(readings))
    painter.setPen(QPen(colors.color("border_strong"), 1))
    painter.setBrush(colors.color("surface"))
    painter.drawRoundedRect(box, 6, 6)
    for row, one in enumerate(readings):
        words = QRectF(box.left() + 8, box.top() + 3 + 18 * row, width - 16, 18)
        painter.setPen(colors.color("text" if len(readings) == 1 else one.color))
        painter.drawText(words, int(Qt.AlignmentFlag.AlignVCenter), one.text)
    painter.setPen(Qt.PenStyle.NoPen)
    for one in readings:
        if one.value == one.value:  # not NaN
            y = min(max(frame.y_of(one.value), area.top()), area.bottom())
            painter.setBrush(colors.color(one.color))
            painter.drawEllipse(QPointF(x, y), 3.5, 3.5)

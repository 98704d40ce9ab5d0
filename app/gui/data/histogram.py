"""Histogram of the lengths of rows, in tokens; rows beyond the limit have another colour."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.gui.kit.primitives import show_tooltip
from app.gui.kit.theme import Theme
from app.presentation.rows_text import name_bars
from app.text import count_of, show_count

HEIGHT_PX = 150
_LABEL_PX = 18
_GAP_PX = 4
_MAX_BAR_PX = 64


class Histogram(QWidget):
    """One bar for each doubling of the length."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._bars: list[tuple[str, int, int]] = []
        self._most = 0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(320, HEIGHT_PX)

    def show_lengths(self, lengths: tuple[int, ...], most: int) -> None:
        """Show numbers of rows by length; `most` is the length at which rows are cut."""
        self._bars, self._most = name_bars(lengths), most
        # A painted bar says nothing to a screen reader.
        said = ", ".join(
            f"{label} tokens: {count_of(rows, 'row')}" for label, _, rows in self._bars
        )
        self.setAccessibleName(f"Lengths of rows. {said}")
        self.update()

    def _place(self, number: int) -> QRectF:
        width = min(_MAX_BAR_PX, self.width() / max(1, len(self._bars)))
        return QRectF(number * width, 0, width - _GAP_PX, self.height())

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent):
            for number, (label, _, rows) in enumerate(self._bars):
                if self._place(number).contains(event.pos()):
                    show_tooltip(event.globalPos(), f"{label} tokens: {rows:,} rows", self)
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._theme.font(11))
        colors = self._theme.palette
        highest = max((rows for _, _, rows in self._bars), default=0) or 1
        room = self.height() - 2 * _LABEL_PX
        for number, (_, most, rows) in enumerate(self._bars):
            area = self._place(number)
            height = max(1.0, room * rows / highest)
            bar = QRectF(area.left(), _LABEL_PX + room - height, area.width(), height)
            name = "chart_temperature" if most > self._most else "chart_utilisation"
            painter.fillRect(bar, colors.color(name))
            painter.setPen(colors.color("muted"))
            below = QRectF(
                area.left() - _GAP_PX, bar.bottom(), area.width() + 2 * _GAP_PX, _LABEL_PX
            )
            painter.drawText(below, int(Qt.AlignmentFlag.AlignCenter), f"{most:,}")
            above = QRectF(below.left(), bar.top() - _LABEL_PX, below.width(), _LABEL_PX)
            if rows:
                painter.drawText(above, int(Qt.AlignmentFlag.AlignCenter), show_count(rows))

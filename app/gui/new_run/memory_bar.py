"""Memory forecast of a GPU as a stacked bar; what exceeds the available memory is red."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.gui.kit.primitives import make_tooltip
from app.gui.kit.theme import Theme
from app.text import show_bytes

HEIGHT_PX = 12
COLORS = ("chart_utilisation", "chart_memory", "chart_tokens", "chart_temperature", "chart_muted")
"""Colours of the memory groups, in their order."""


class MemoryBar(QWidget):
    """Stacked bar of memory groups."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._parts: tuple[tuple[str, int], ...] = ()
        self._room_bytes = 0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(120, HEIGHT_PX)

    def show_parts(self, parts: Sequence[tuple[str, int]], room_bytes: int) -> None:
        """Show groups of bytes against the available memory; any excess is painted in the error
        colour.

        Args:
            parts: name and size in bytes of each group; at most one per colour.
            room_bytes: available memory, in bytes.
        """
        self._parts, self._room_bytes = tuple(parts), room_bytes
        words = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts if size)
        self.setToolTip(make_tooltip(words))
        # A painted bar says nothing to a screen reader.
        self.setAccessibleName(f"{words}; available {show_bytes(room_bytes)}")
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        used = sum(size for _, size in self._parts)
        # Scale to what is larger, so that an overflow shows as red beyond the end of the memory.
        whole = max(used, self._room_bytes, 1)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        palette = self._theme.palette
        area = QRectF(self.rect())
        painter.setBrush(palette.color("sunken"))
        painter.drawRoundedRect(area, 3, 3)
        left = 0.0
        for (_, size), color in zip(self._parts, COLORS, strict=False):
            width = area.width() * size / whole
            # a gap separates neighbours for people who cannot tell their colours apart
            seen = width - 1 if width > 3 else width
            painter.fillRect(QRectF(left, 0, seen, area.height()), palette.color(color))
            left += width
        if used > self._room_bytes:
            edge = area.width() * self._room_bytes / whole
            beyond = QRectF(edge, 0, area.width() - edge, area.height())
            painter.fillRect(beyond, palette.color("error"))
        painter.end()


class Swatch(QWidget):
    """Small square in the colour of a group, for the legend."""

    def __init__(self, theme: Theme, color: str) -> None:
        super().__init__()
        self._theme, self._color = theme, color
        self.setFixedSize(8, 8)
        theme.changed.connect(self.update)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self._theme.palette.color(self._color))
        painter.end()

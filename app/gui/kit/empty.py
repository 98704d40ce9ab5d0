"""Placeholder for an empty page or table: what belongs there, and buttons to add it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.gui.kit.primitives import make_label
from app.gui.kit.theme import Theme

WIDTH_PX = 460


class Waiting(QWidget):
    """Placeholder until the first answer: nothing known yet does not mean that there is nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        column = QVBoxLayout(self)
        column.addStretch(2)
        column.addWidget(make_label(text, "muted"), 0, Qt.AlignmentFlag.AlignHCenter)
        column.addStretch(3)


class EmptyState(QWidget):
    """Icon, title, explanation and buttons, centred in the space available."""

    def __init__(
        self, theme: Theme, icon: str, title: str, text: str, buttons: Sequence[QWidget] = ()
    ) -> None:
        super().__init__()
        self._theme, self._icon = theme, icon
        self._glyph = QLabel()
        heading = make_label(title, "heading")
        words = make_label(text, "muted", wraps=True)
        words.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        words.setFixedWidth(WIDTH_PX)
        column = QVBoxLayout(self)
        column.setSpacing(8)
        column.addStretch(2)
        for widget in (self._glyph, heading):
            column.addWidget(widget, 0, Qt.AlignmentFlag.AlignHCenter)
        # With an alignment, a layout ignores height-for-width and cuts the last line of a wrapped
        # label; stretches on both sides centre it and keep its height.
        middle = QHBoxLayout()
        middle.addStretch(1)
        middle.addWidget(words)
        middle.addStretch(1)
        column.addLayout(middle)
        column.addSpacing(12)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addStretch(1)
        for button in buttons:
            row.addWidget(button)
        row.addStretch(1)
        column.addLayout(row)
        column.addStretch(3)
        theme.changed.connect(self._paint_glyph)
        self._paint_glyph()

    def _paint_glyph(self) -> None:
        scale = self.devicePixelRatioF()
        self._glyph.setPixmap(self._theme.pixmap(self._icon, "muted", 40, scale))

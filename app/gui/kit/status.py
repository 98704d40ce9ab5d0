"""Draw a state as a glyph, words and a colour, so that it never depends on colour alone."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QFontMetricsF, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.gui.kit.theme import Theme
from app.telemetry.state import Status

GLYPH_PX = 14
GAP_PX = 6
PADDING_PX = 8
HEIGHT_PX = 24


def paint_status(
    painter: QPainter, theme: Theme, status: Status, area: QRectF, size_px: int = 12
) -> None:
    """Draw glyph and words into `area`, vertically centred, elided where they do not fit."""
    top = area.center().y() - GLYPH_PX / 2
    # Whole pixels: a pixmap painted between two of them is blurred.
    glyph = QRectF(area.left(), round(top), GLYPH_PX, GLYPH_PX)
    theme.paint_icon(painter, status.tone, status.tone, glyph)
    words = area.adjusted(GLYPH_PX + GAP_PX, 0, 0, 0)
    text = QFontMetricsF(theme.font(size_px, 500)).elidedText(
        status.text, Qt.TextElideMode.ElideRight, words.width() + 0.5
    )
    theme.paint_text(painter, words, text, size_px, status.tone, weight=500)


class StatusPill(QWidget):
    """A state on a rounded, tinted background."""

    def __init__(self, theme: Theme, status: Status) -> None:
        super().__init__()
        self._theme = theme
        self._status = status
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)
        self.show_status(status)

    def show_status(self, status: Status) -> None:
        # The name is empty on the first call only, which has to set it.
        if status == self._status and self.accessibleName():
            return
        self._status = status
        self.setAccessibleName(f"State: {status.text}")
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        width = QFontMetricsF(self._theme.font(12, 500)).horizontalAdvance(self._status.text)
        return QSize(round(width) + GLYPH_PX + GAP_PX + 2 * PADDING_PX + 2, HEIGHT_PX)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(self._theme.palette.color(f"{self._status.tone}_tint"))
        painter.drawRoundedRect(QRectF(self.rect()), HEIGHT_PX / 2, HEIGHT_PX / 2)
        area = QRectF(self.rect()).adjusted(PADDING_PX, 0, -PADDING_PX + 2, 0)
        paint_status(painter, self._theme, self._status, area)

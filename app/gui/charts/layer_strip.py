"""Layers of a model as a strip, and which of them one GPU has: held, or streamed to it."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.gui.kit.primitives import set_tooltip
from app.gui.kit.theme import Theme
from app.presentation.stage_text import StageRow

HEIGHT_PX = 8


class LayerStrip(QWidget):
    """Strip as long as the model: stages of several GPUs below each other look like a stair."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._row: StageRow | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(120, HEIGHT_PX)

    def show_stage(self, row: StageRow) -> None:
        """Show one GPU's layers."""
        self._row = row
        set_tooltip(self, row.layers_text)
        # A painted strip says nothing to a screen reader.
        self.setAccessibleName(f"{row.title}: {row.layers_text}")
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        row = self._row
        if row is None or not row.num_layers:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        palette = self._theme.palette
        painter.setBrush(palette.color("sunken"))
        painter.drawRoundedRect(QRectF(self.rect()), 3, 3)
        color = palette.color("chart_utilisation")
        # Streamed layers are hatched, so that they do not depend on colour alone.
        cut = row.stop_layer - row.num_streamed
        self._fill(painter, row.first_layer, cut, QBrush(color))
        self._fill(painter, cut, row.stop_layer, _hatched(color))
        painter.end()

    def _fill(self, painter: QPainter, first: int, stop: int, brush: QBrush) -> None:
        if self._row is None or stop <= first:
            return
        scale = self.width() / self._row.num_layers
        area = QRectF(first * scale, 0, (stop - first) * scale, self.height())
        painter.fillRect(area, brush)


def _hatched(color: QColor) -> QBrush:
    return QBrush(color, Qt.BrushStyle.BDiagPattern)

"""One device on the live wall: painted by hand, so that only a card with new figures repaints.

A screen reader gets the same figures as text; each part explains itself in a tooltip.
"""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QEvent, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QFontMetricsF,
    QHelpEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
)
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.gui.charts.sparkline import paint_sparkline
from app.gui.theme import Theme
from app.gui.widgets.status import paint_status
from app.telemetry.alerts import share_of
from app.telemetry.state import Status
from app.telemetry.stream import MEMORY, TEMPERATURE, TIME, TOKENS, UTILISATION, Device
from app.text import DASH, show_bytes_of, show_celsius, show_rate, show_share, show_watts

HEIGHT_PX = 224
MIN_WIDTH_PX = 300
PAD_PX = 16
TILE_HEIGHT_PX = 50
TILE_GAP_PX = 12
WINDOW_S = 300.0
"""Sparklines show the last five minutes."""
LOW_CELSIUS, HIGH_CELSIUS = 20.0, 100.0

_TIPS = {
    "name": "The device as its driver calls it",
    "state": "What the device does now",
    "memory": "Memory in use and in all. The bar fills towards the whole",
    "load": "Share of time in which the device was computing, last 5 minutes",
    "share": "Share of the memory in use, last 5 minutes",
    "heat": "Temperature (line: last 5 minutes, 20 to 100 \u00b0C) and power draw",
    "tokens": "Tokens this rank trains on per second, last 5 minutes",
}


class DeviceCard(QWidget):
    """The card of one device; its owner calls `refresh` when figures or state changed."""

    activated = Signal()

    def __init__(self, theme: Theme, device: Device, status: Status) -> None:
        super().__init__()
        self._theme = theme
        self.device = device
        self.status = status
        self._is_live = True
        self._names: tuple[int, str, str] = (0, "", "")
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        theme.changed.connect(self.update)
        self._describe()

    def refresh(self, status: Status, *, is_live: bool = True) -> None:
        """Show the newest figures; of a node that does not answer, only what was before."""
        self.status = status
        self._is_live = is_live
        self._describe()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(MIN_WIDTH_PX, HEIGHT_PX)

    # ------------------------------------------------------------ painting

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        colors = self._theme.palette
        painter.fillRect(self.rect(), colors.color("window"))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        frame = QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5)
        is_loud = self.status.tone in ("warning", "error")
        edge = self.status.tone if is_loud else "border"
        painter.setPen(QPen(colors.color("accent" if self.hasFocus() else edge), 1))
        painter.setBrush(colors.color("surface"))
        painter.drawRoundedRect(frame, 10, 10)
        if self.hasFocus():
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(frame.adjusted(1, 1, -1, -1), 9, 9)
        self._paint_head(painter)
        self._paint_memory(painter)
        self._paint_tiles(painter)

    def _paint_head(self, painter: QPainter) -> None:
        width = self.width() - 2 * PAD_PX
        reading = self.device.reading
        place = self.device.key.device.replace("cuda:", "GPU ").replace("cpu", "CPU")
        area = QRectF(PAD_PX, 12, width, 20)
        self._text(painter, area, place, 12, "muted", Qt.AlignmentFlag.AlignRight)
        area.setWidth(width - 48)
        self._text(
            painter, area, self._short_name(reading.name, area.width()), 13, "text", weight=600
        )
        paint_status(painter, self._theme, self.status, QRectF(PAD_PX, 33, width, 20))

    def _paint_memory(self, painter: QPainter) -> None:
        reading, colors = self.device.reading, self._theme.palette
        area = QRectF(PAD_PX, 58, self.width() - 2 * PAD_PX, 18)
        self._text(painter, area, "VRAM" if reading.is_gpu else "RAM", 12, "muted")
        used = reading.memory_used_bytes if self._is_live else None
        text = show_bytes_of(used, reading.memory_total_bytes)
        self._text(painter, area, text, 12, "text", Qt.AlignmentFlag.AlignRight, weight=500)
        bar = QRectF(PAD_PX, 79, area.width(), 6)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colors.color("chart_grid"))
        painter.drawRoundedRect(bar, 3, 3)
        share = share_of(used, reading.memory_total_bytes)
        if share:
            bar.setWidth(max(6.0, bar.width() * min(share, 1.0)))
            painter.setBrush(colors.color("chart_memory"))
            painter.drawRoundedRect(bar, 3, 3)

    def _paint_tiles(self, painter: QPainter) -> None:
        reading = self.device.reading
        memory = share_of(reading.memory_used_bytes, reading.memory_total_bytes)
        heat = f"{show_celsius(reading.temperature_celsius)} \u00b7 {show_watts(reading.power_w)}"
        texts = (
            ("Load", show_share(reading.utilisation)),
            ("Memory", show_share(memory)),
            ("Heat", heat),
            ("Tokens/s", show_rate(reading.tokens_per_s, "").strip()),
        )
        rows = self.device.history.view()
        tokens = float(np.nanmax(rows[TOKENS])) if np.isfinite(rows[TOKENS]).any() else 1.0
        scales = (
            (UTILISATION, 0.0, 1.0, "chart_utilisation"),
            (MEMORY, 0.0, float(reading.memory_total_bytes or 1), "chart_memory"),
            (TEMPERATURE, LOW_CELSIUS, HIGH_CELSIUS, "chart_temperature"),
            (TOKENS, 0.0, tokens * 1.2, "chart_tokens"),
        )
        for index, ((label, value), (row, low, high, color)) in enumerate(
            zip(texts, scales, strict=True)
        ):
            tile = self._tile(index)
            self._text(painter, tile, label, 12, "muted")
            value = value if self._is_live else DASH
            color = color if self._is_live else "chart_muted"
            self._text(painter, tile, value, 13, "text", Qt.AlignmentFlag.AlignRight, weight=600)
            chart = tile.adjusted(0, 21, 0, 0)
            painter.setPen(QPen(self._theme.palette.color("chart_grid"), 1))
            painter.drawLine(chart.bottomLeft(), chart.bottomRight())
            paint_sparkline(
                painter,
                chart,
                rows[TIME],
                rows[row],
                low=low,
                high=high,
                window_s=WINDOW_S,
                color=self._theme.palette.color(color),
            )

    def _tile(self, index: int) -> QRectF:
        width = (self.width() - 2 * PAD_PX - PAD_PX) / 2
        left = PAD_PX + (index % 2) * (width + PAD_PX)
        top = 98 + (index // 2) * (TILE_HEIGHT_PX + TILE_GAP_PX)
        return QRectF(left, top, width, TILE_HEIGHT_PX)

    def _text(
        self,
        painter: QPainter,
        area: QRectF,
        text: str,
        size_px: int,
        color: str,
        side: Qt.AlignmentFlag = Qt.AlignmentFlag.AlignLeft,
        weight: int = 400,
    ) -> None:
        painter.setFont(self._theme.font(size_px, weight))
        painter.setPen(self._theme.palette.color(color))
        line = QRectF(area.left(), area.top(), area.width(), 18)
        painter.drawText(line, int(side | Qt.AlignmentFlag.AlignVCenter), text)

    def _short_name(self, name: str, room_px: float) -> str:
        known_room, known, short = self._names
        if (known_room, known) != (round(room_px), name):
            plain = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
            metrics = QFontMetricsF(self._theme.font(13, 600))
            short = metrics.elidedText(plain, Qt.TextElideMode.ElideRight, room_px)
            self._names = (round(room_px), name, short)
        return short

    # ------------------------------------------------------------ people

    def _describe(self) -> None:
        reading = self.device.reading
        key = self.device.key
        self.setAccessibleName(f"{key.node}, {reading.name}: {self.status.text}")
        unit = "VRAM" if reading.is_gpu else "RAM"
        memory = show_bytes_of(reading.memory_used_bytes, reading.memory_total_bytes)
        figures = (
            f"load {show_share(reading.utilisation)}, {unit} {memory}, "
            f"{show_celsius(reading.temperature_celsius)}, {show_watts(reading.power_w)}, "
            f"{show_rate(reading.tokens_per_s, 'tokens per second')}"
        )
        if not self._is_live:
            figures = "no figures now"
        self.setAccessibleDescription(figures.replace(DASH, "not known"))

    def _part_at(self, x: float, y: float) -> str:
        for index, name in enumerate(("load", "share", "heat", "tokens")):
            if self._tile(index).contains(x, y):
                return name
        return "name" if y < 33 else "state" if y < 56 else "memory" if y < 90 else ""

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            part = self._part_at(event.pos().x(), event.pos().y())
            extra = {"name": f"\n{self.device.reading.name}", "state": f"\n{self.status.text}"}
            text = _TIPS[part] + extra.get(part, "") if part else ""
            QToolTip.showText(event.globalPos(), text, self)
            return True
        return super().event(event)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton and QRectF(self.rect()).contains(
            event.position()
        ):
            self.activated.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.activated.emit()
        else:
            super().keyPressEvent(event)

"""Card of one device on the live wall, painted by hand so that only changed cards repaint.

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
    QPixmap,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.gui.charts.sparkline import Trace, paint_sparklines
from app.gui.kit.primitives import show_tooltip
from app.gui.kit.status import paint_status
from app.gui.kit.theme import Theme
from app.gui.tables.device_columns import name_place
from app.telemetry.alerts import share_of
from app.telemetry.history import Array
from app.telemetry.state import Status
from app.telemetry.stream import MEMORY, TEMPERATURE, TIME, TOKENS, UTILISATION, Device
from app.text import (
    DASH,
    short_card,
    show_bytes_of,
    show_celsius,
    show_mhz,
    show_number,
    show_rate,
    show_share,
    show_watts,
)

HEIGHT_PX = 224
MIN_WIDTH_PX = 300
PAD_PX = 16
TILE_HEIGHT_PX = 50
TILE_GAP_PX = 12
MIN_SPAN_S, MAX_SPAN_S = 60.0, 300.0
"""Minimum and maximum time span of the sparklines, in seconds."""
LOW_CELSIUS, HIGH_CELSIUS = 20.0, 100.0

# Caption of each tile, and the width reserved for its figure, in pixels.
_CAPTIONS = (("Load", 52), ("Memory", 52), ("Temp", 98), ("Tokens/s", 64))
_TIPS = {
    "name": "Device name reported by its driver",
    "state": "What the device is doing now",
    "memory": "Memory in use and total",
    "load": "Share of time the device was computing, last 5 minutes",
    "share": "Share of memory in use, last 5 minutes",
    "heat": "Temperature (line: last 5 minutes, 20 to 100 \u00b0C) and power draw",
    "tokens": "Tokens trained per second by this rank, last 5 minutes",
}


class DeviceCard(QWidget):
    """Card of one device; its owner calls `refresh` when figures or state have changed."""

    activated = Signal()

    def __init__(self, theme: Theme, device: Device, status: Status) -> None:
        super().__init__()
        self._theme = theme
        self.device = device
        self.status = status
        self._is_live = True
        self._names: tuple[int, str, str] = (0, "", "")
        # The backdrop covers every pixel, so Qt need not erase the background first.
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        theme.changed.connect(self.update)
        self._describe()

    def refresh(self, status: Status, *, is_live: bool = True) -> None:
        """Show the newest figures; if the node does not respond, only its history."""
        self.status = status
        self._is_live = is_live
        self._describe()
        self.update()

    def show_status(self, status: Status, *, is_live: bool) -> None:
        """Show the state of the node; repaints only if it has changed."""
        if (status, is_live) != (self.status, self._is_live):
            self.refresh(status, is_live=is_live)

    def sizeHint(self) -> QSize:
        return QSize(MIN_WIDTH_PX, HEIGHT_PX)

    # ------------------------------------------------------------ painting

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.drawPixmap(0, 0, self._backdrop())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        self._paint_head(painter)
        self._paint_memory(painter)
        self._paint_tiles(painter)

    def _backdrop(self) -> QPixmap:
        """Return the static parts (frame, captions, base lines) as a pixmap shared by like
        cards.
        """
        is_loud = self.status.tone in ("warning", "error")
        edge = "accent" if self.hasFocus() else self.status.tone if is_loud else "border"
        scale = self.devicePixelRatioF()
        is_gpu = self.device.reading.is_gpu
        # Cards of equal size and tone share one pixmap: a wall of a hundred needs only a few.
        key = (self.width(), self.height(), scale, edge, self.hasFocus(), is_gpu)
        return self._theme.cached_pixmap(key, lambda: self._paint_backdrop(edge, scale, is_gpu))

    def _paint_backdrop(self, edge: str, scale: float, is_gpu: bool) -> QPixmap:
        pixmap = QPixmap(self.size() * scale)
        pixmap.setDevicePixelRatio(scale)
        colors = self._theme.palette
        pixmap.fill(colors.color("window"))
        painter = QPainter(pixmap)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        frame = QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5)
        painter.setPen(QPen(colors.color(edge), 1))
        painter.setBrush(colors.color("surface"))
        painter.drawRoundedRect(frame, 10, 10)
        if self.hasFocus():
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(frame.adjusted(1, 1, -1, -1), 9, 9)
        self._text(painter, self._memory_line(), "VRAM" if is_gpu else "RAM", 12, "muted")
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colors.color("chart_grid"))
        painter.drawRoundedRect(self._bar(), 3, 3)
        metrics = QFontMetricsF(self._theme.font(12))
        for index, (caption, figure_px) in enumerate(_CAPTIONS):
            tile = self._tile(index)
            room_px = tile.width() - figure_px
            shown = metrics.elidedText(caption, Qt.TextElideMode.ElideRight, room_px)
            self._text(painter, tile, shown, 12, "muted")
            painter.fillRect(
                QRectF(tile.left(), tile.bottom() - 1, tile.width(), 1), colors.color("chart_grid")
            )
        painter.end()
        return pixmap

    def _paint_head(self, painter: QPainter) -> None:
        width = self.width() - 2 * PAD_PX
        place = name_place(self.device.key.device)
        area = QRectF(PAD_PX, 12, width, 20)
        self._text(painter, area, place, 12, "muted", is_right=True)
        # Leaves room for the place at the right, such as "GPU 0".
        area.setWidth(width - 48)
        name = self._short_name(self.device.reading.name, area.width())
        self._text(painter, area, name, 13, "text", weight=600)
        paint_status(painter, self._theme, self.status, QRectF(PAD_PX, 33, width, 20))

    def _paint_memory(self, painter: QPainter) -> None:
        reading = self.device.reading
        # Old figures of a silent node would look like current ones: show a dash.
        used = reading.memory_used_bytes if self._is_live else None
        text = show_bytes_of(used, reading.memory_total_bytes)
        self._text(painter, self._memory_line(), text, 12, "text", weight=500, is_right=True)
        share = share_of(used, reading.memory_total_bytes)
        if share:
            bar = self._bar()
            # Below the diameter of its corners a rounded bar would look broken.
            bar.setWidth(max(6.0, bar.width() * min(share, 1.0)))
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self._theme.palette.color("chart_memory"))
            painter.drawRoundedRect(bar, 3, 3)

    def _paint_tiles(self, painter: QPainter) -> None:
        reading, palette = self.device.reading, self._theme.palette
        memory = share_of(reading.memory_used_bytes, reading.memory_total_bytes)
        heat = f"{show_celsius(reading.temperature_celsius)} \u00b7 {show_watts(reading.power_w)}"
        # One dash instead of two when neither is known.
        if reading.temperature_celsius is None and reading.power_w is None:
            heat = DASH
        values = (
            show_share(reading.utilisation),
            show_share(memory),
            heat,
            show_number(reading.tokens_per_s),
        )
        history = self.device.history.view()
        # fmax ignores NaN, which stands for steps without a figure; initial covers an empty
        # history.
        # `or 1.0`: a history of zeros still needs a scale with a height.
        fastest = np.fmax.reduce(history[TOKENS], initial=0.0) or 1.0
        scales = (
            (0.0, 1.0, "chart_utilisation"),
            (0.0, float(reading.memory_total_bytes or 1), "chart_memory"),
            (LOW_CELSIUS, HIGH_CELSIUS, "chart_temperature"),
            # Headroom of 20 %, so that a steady speed does not stick to the upper edge.
            (0.0, float(fastest) * 1.2, "chart_tokens"),
        )
        traces = []
        for index, (value, (low, high, color)) in enumerate(zip(values, scales, strict=True)):
            tile = self._tile(index)
            shown = value if self._is_live else DASH
            self._text(painter, tile, shown, 13, "text", weight=600, is_right=True)
            shade = palette.color(color if self._is_live else "chart_muted")
            traces.append(Trace(tile.adjusted(0, 21, 0, 0), low, high, shade))
        rows = history[[UTILISATION, MEMORY, TEMPERATURE, TOKENS]]
        paint_sparklines(painter, traces, history[TIME], rows, _choose_span_s(history[TIME]))

    def _memory_line(self) -> QRectF:
        return QRectF(PAD_PX, 58, self.width() - 2 * PAD_PX, 18)

    def _bar(self) -> QRectF:
        return QRectF(PAD_PX, 79, self.width() - 2 * PAD_PX, 6)

    def _tile(self, index: int) -> QRectF:
        # Two tiles side by side: padding at both edges and once between them.
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
        *,
        weight: int = 400,
        is_right: bool = False,
    ) -> None:
        line = QRectF(area.left(), area.top(), area.width(), 18)
        self._theme.paint_text(
            painter, line, text, size_px, color, weight=weight, is_right=is_right
        )

    def _short_name(self, name: str, room_px: float) -> str:
        known_room, known, short = self._names
        # Eliding measures text, which is slow at one card per second and device: keep the result.
        if (known_room, known) != (round(room_px), name):
            metrics = QFontMetricsF(self._theme.font(13, 600))
            short = metrics.elidedText(short_card(name), Qt.TextElideMode.ElideRight, room_px)
            self._names = (round(room_px), name, short)
        return short

    # ------------------------------------------------------------ interaction

    def _describe(self) -> None:
        reading = self.device.reading
        key = self.device.key
        self.setAccessibleName(f"{key.node}, {reading.name}: {self.status.text}")
        unit = "VRAM" if reading.is_gpu else "RAM"
        memory = show_bytes_of(reading.memory_used_bytes, reading.memory_total_bytes)
        figures = (
            f"load {show_share(reading.utilisation)}, {unit} {memory}, "
            f"{show_celsius(reading.temperature_celsius)}, {show_watts(reading.power_w)}, "
            f"clock {show_mhz(reading.clock_mhz)}, fan {show_share(reading.fan)}, "
            f"{show_rate(reading.tokens_per_s, 'tokens per second')}"
        )
        if not self._is_live:
            figures = "no data"
        self.setAccessibleDescription(figures.replace(DASH, "unknown"))

    def _part_at(self, x: float, y: float) -> str:
        for index, name in enumerate(("load", "share", "heat", "tokens")):
            if self._tile(index).contains(x, y):
                return name
        return "name" if y < 33 else "state" if y < 56 else "memory" if y < 90 else ""

    def _tip(self, part: str) -> str:
        """Return the tooltip of a part, with figures that have no room on the card itself."""
        if not part:
            return ""
        reading = self.device.reading
        clock, fan = reading.clock_mhz, reading.fan
        details = {
            "name": reading.name,
            "state": self.status.text,
            "load": f"Clock: {show_mhz(clock if self._is_live else None)}",
            "heat": f"Fan: {show_share(fan if self._is_live else None)}",
        }
        return "\n".join(filter(None, (_TIPS[part], details.get(part))))

    def event(self, event: QEvent) -> bool:
        # The parts are painted, not widgets, so Qt cannot give each its own tooltip.
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            tip = self._tip(self._part_at(event.pos().x(), event.pos().y()))
            show_tooltip(event.globalPos(), tip, self)
            return True
        return super().event(event)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        # On release, as buttons do: a press can be taken back by moving off the card.
        if event.button() == Qt.MouseButton.LeftButton and QRectF(self.rect()).contains(
            event.position()
        ):
            self.activated.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.activated.emit()
        else:
            super().keyPressEvent(event)


def _choose_span_s(times: Array) -> float:
    span_s = float(times[-1] - times[0]) if len(times) else 0.0
    return min(max(span_s, MIN_SPAN_S), MAX_SPAN_S)

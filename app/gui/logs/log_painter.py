"""Paints the lines of a log that are in view, with their numbers beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QFontMetrics, QPainter

from app.gui.kit.theme import Theme
from app.gui.logs.log_document import MAX_LINE_CHARS, LogDocument

PAD_PX = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What stands out among the lines."""

    is_marked: Callable[[int], bool]
    """Whether a line is marked, by its number."""
    words: str
    """Searched for; empty: nothing."""
    found_line: int | None
    """Where the search stands."""


class LinePainter:
    """Knows how large lines are."""

    def __init__(self, theme: Theme) -> None:
        self._theme = theme
        self._font = theme.font(12, monospace=True)
        metrics = QFontMetrics(self._font)
        self.line_px = metrics.height() + 4
        self.char_px = max(metrics.horizontalAdvance("0"), 1)
        self.widest_chars = 0
        """Of the lines painted so far."""

    def paint_nothing(self, painter: QPainter, area: QRect, words: str) -> None:
        """Say why there are no lines."""
        painter.fillRect(area, self._theme.palette.color("surface"))
        painter.setPen(self._theme.palette.color("muted"))
        painter.setFont(self._theme.font(13))
        painter.drawText(area, int(Qt.AlignmentFlag.AlignCenter), words)

    def paint(
        self,
        painter: QPainter,
        area: QRect,
        document: LogDocument,
        numbers: Sequence[int],
        marks: Marks,
        *,
        skipped_chars: int,
    ) -> int:
        """Paint lines from the top of `area` on, and return how many characters fit into it.

        Args:
            painter: of the viewport.
            area: the whole of it.
            document: where the lines are.
            numbers: of the lines in view, downwards.
            marks: what stands out.
            skipped_chars: scrolled out at the left.
        """
        colors = self._theme.palette
        painter.fillRect(area, colors.color("surface"))
        painter.setFont(self._font)
        digits = len(str(document.end_line))
        gutter = PAD_PX + digits * self.char_px + PAD_PX
        left = gutter - skipped_chars * self.char_px
        needle = marks.words.casefold()
        for row, number in enumerate(numbers):
            y = PAD_PX // 2 + row * self.line_px
            text = document.line(number)[:MAX_LINE_CHARS].replace("\t", "    ")
            self.widest_chars = max(self.widest_chars, len(text))
            line = QRect(0, y, area.width(), self.line_px)
            if marks.is_marked(number):
                painter.fillRect(line, colors.color("selected"))
            elif needle and needle in text.casefold():
                tint = "warning_tint" if number == marks.found_line else "calm_tint"
                painter.fillRect(line, colors.color(tint))
            painter.setPen(colors.color("text"))
            wide = QRect(left, y, len(text) * self.char_px * 2 + 8, self.line_px)
            painter.drawText(wide, int(Qt.AlignmentFlag.AlignVCenter), text)
            painter.fillRect(QRect(0, y, gutter - 8, self.line_px), colors.color("surface"))
            painter.setPen(colors.color("muted"))
            count = QRect(PAD_PX, y, digits * self.char_px, self.line_px)
            side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(count, int(side), f"{number + 1}")
        return (area.width() - gutter) // self.char_px

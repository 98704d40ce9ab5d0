"""Paint the lines of a log that are in view, with line numbers on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QFontMetrics, QPainter

from app.gui.kit.theme import Theme
from app.gui.logs.log_document import MAX_LINE_CHARS, LogDocument
from app.text import show_foreign

PAD_PX = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Highlights among the lines."""

    is_marked: Callable[[int], bool]
    """Returns whether a line number is selected."""
    words: str
    """Text searched for; empty for none."""
    found_line: int | None
    """Line number of the current match."""


class LinePainter:
    """Paints lines in the monospace font, and knows their size."""

    def __init__(self, theme: Theme) -> None:
        self._theme = theme
        self._font = theme.font(12, monospace=True)
        metrics = QFontMetrics(self._font)
        self.line_px = metrics.height() + 4
        self.char_px = max(metrics.horizontalAdvance("0"), 1)
        self.widest_chars = 0
        """Length of the longest line painted so far, for the horizontal scroll bar."""

    def paint_nothing(self, painter: QPainter, area: QRect, words: str) -> None:
        """Paint `words` in place of lines; they explain that the log is empty or filtered."""
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
        """Paint lines from the top of `area` down; return how many characters fit after the
        numbers.

        Args:
            painter: painter of the viewport.
            area: rectangle of the viewport.
            document: the log.
            numbers: line numbers in view, from the top.
            marks: selection and search.
            skipped_chars: characters scrolled out on the left.
        """
        colors = self._theme.palette
        painter.fillRect(area, colors.color("surface"))
        painter.setFont(self._font)
        # From the last line of the log, so that scrolling does not change the width of the gutter.
        digits = len(str(document.end_line))
        gutter = PAD_PX + digits * self.char_px + PAD_PX
        left = gutter - skipped_chars * self.char_px
        needle = marks.words.casefold()
        for row, number in enumerate(numbers):
            y = PAD_PX // 2 + row * self.line_px
            whole = document.line(number)[:MAX_LINE_CHARS].replace("\t", "    ")
            text = show_foreign(whole)[:MAX_LINE_CHARS]
            self.widest_chars = max(self.widest_chars, len(text))
            line = QRect(0, y, area.width(), self.line_px)
            if marks.is_marked(number):
                painter.fillRect(line, colors.color("selected"))
            elif needle and needle in text.casefold():
                tint = "warning_tint" if number == marks.found_line else "calm_tint"
                painter.fillRect(line, colors.color(tint))
            painter.setPen(colors.color("text"))
            # Twice the width: characters of East Asian scripts take two cells, and drawText would
            # clip.
            wide = QRect(left, y, len(text) * self.char_px * 2 + 8, self.line_px)
            painter.drawText(wide, int(Qt.AlignmentFlag.AlignVCenter), text)
            # After the text: a line that is scrolled to the left passes below its number.
            painter.fillRect(QRect(0, y, gutter - 8, self.line_px), colors.color("surface"))
            painter.setPen(colors.color("muted"))
            count = QRect(PAD_PX, y, digits * self.char_px, self.line_px)
            side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(count, int(side), f"{number + 1}")
        return (area.width() - gutter) // self.char_px

"""A log viewer that paints only the lines in view, so that length costs nothing.

It follows the end until the user scrolls up, and again once they scroll back down. New lines never
move the lines that the user is reading. The mouse selects whole lines; Ctrl+C copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import (
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
)
from PySide6.QtWidgets import QAbstractScrollArea, QApplication

from app.gui.kit.theme import Theme
from app.gui.logs.log_document import Block, LogDocument
from app.gui.logs.log_levels import Level, ShownLines
from app.gui.logs.log_painter import PAD_PX, LinePainter, Marks

SEARCH_BLOCKS_PER_TURN = 2
"""Blocks searched per turn of the event loop: some milliseconds."""
MAX_COPY_LINES = 100_000
"""Maximum number of lines that one copy puts on the clipboard."""
_NOTHING = "The log is still empty"


class LogView(QAbstractScrollArea):
    """Shows a LogDocument."""

    follow_changed = Signal(bool)
    searched = Signal(bool)
    """A search ended; carries whether it found anything."""
    level_changed = Signal(str)
    """Lines of another Level are shown."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.document = LogDocument()
        self.shown = ShownLines(self.document)
        self.is_following = True
        self.found_line: int | None = None
        self._query = ""
        self._search: Iterator[int | None] | None = None
        self._marked: tuple[int, int] | None = None
        self._painter = LinePainter(theme)
        self._is_moving = False
        self._timer = QTimer(self, interval=0)
        self._timer.timeout.connect(self._search_on)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName("Log")
        self.setFrameShape(QAbstractScrollArea.Shape.NoFrame)
        self.viewport().setCursor(Qt.CursorShape.IBeamCursor)
        self.verticalScrollBar().valueChanged.connect(self._scrolled)
        theme.changed.connect(self.viewport().update)

    # ------------------------------------------------------------ content

    def clear(self) -> None:
        """Remove all lines, and follow the end again."""
        self._stop_search()
        level = self.shown.level
        self.document = LogDocument()
        self.shown = ShownLines(self.document)
        self.shown.choose(level)
        self.found_line = self._marked = None
        self._painter.widest_chars = 0
        self.follow(True)
        self._grow()

    def append(self, data: bytes) -> None:
        """Append bytes of the log."""
        self._changed(lambda: self.document.append(data))

    def append_block(self, block: Block) -> None:
        """Append lines that were indexed on another thread."""
        self._changed(lambda: self.document.append_block(block))

    def follow(self, is_following: bool) -> None:
        """Keep the newest line in view, or stop doing so."""
        if is_following != self.is_following:
            self.is_following = is_following
            self.follow_changed.emit(is_following)
        if is_following:
            self._move_to(self.verticalScrollBar().maximum())

    def show_level(self, level: Level) -> None:
        """Show the lines of a level; the top line stays on top if it is among them."""
        if level == self.shown.level:
            return
        top = self.shown.number(self.verticalScrollBar().value())
        self.shown.choose(level)
        self._painter.widest_chars, self._marked = 0, None
        self._grow()
        if not self.is_following:
            self._move_to(self.shown.row_of(top) or 0)
        self.level_changed.emit(level)

    def _changed(self, change: Callable[[], None]) -> None:
        before, top = self.document.first_line, self.shown.number(self.verticalScrollBar().value())
        change()
        self.shown.refresh()
        # Dropped lines shift all rows: keep the line on top that the user is reading.
        if self.document.first_line != before and not self.is_following:
            self._move_to(self.shown.row_of(top) or 0)
        self._grow()

    def _grow(self) -> None:
        bar = self.verticalScrollBar()
        visible = self.visible_lines()
        # Changes of the scroll bar by code must not count as the user's scrolling.
        self._is_moving = True
        bar.setPageStep(visible)
        bar.setRange(0, max(len(self.shown) - visible, 0))
        self._is_moving = False
        if self.is_following:
            self._move_to(bar.maximum())
        self.viewport().update()

    def visible_lines(self) -> int:
        """Return the number of lines that fit completely."""
        return max((self.viewport().height() - PAD_PX) // self._painter.line_px, 1)

    def _move_to(self, value: int) -> None:
        self._is_moving = True
        self.verticalScrollBar().setValue(value)
        self._is_moving = False

    def _scrolled(self, value: int) -> None:
        self.viewport().update()
        if not self._is_moving:
            at_end = value >= self.verticalScrollBar().maximum()
            if at_end != self.is_following:
                self.is_following = at_end
                self.follow_changed.emit(at_end)

    # ------------------------------------------------------------ search

    def search(self, words: str, *, backward: bool = False) -> None:
        """Start a search for the next or previous line with `words`; `searched` follows."""
        self._stop_search()
        is_new = words != self._query
        self._query = words
        if not words:
            self.found_line = None
            self.viewport().update()
            return
        top = self.shown.number(self.verticalScrollBar().value())
        start = self.found_line if self.found_line is not None else top
        if self.found_line is not None and not is_new:
            start += -1 if backward else 1
            if start >= self.document.end_line:
                start = self.document.first_line
            elif start < self.document.first_line:
                start = self.document.end_line - 1
        self._search = self.document.search(words, start, backward=backward)
        self._timer.start()  # in slices: a search through 256 MB would freeze the window

    def _search_on(self) -> None:
        for _ in range(SEARCH_BLOCKS_PER_TURN):
            # -1 at the end: None already means that a block had no match.
            found = next(self._search, -1) if self._search is not None else -1
            if found is None:
                continue
            self._stop_search()
            if found >= 0:
                self._show_line(found)
            else:
                self.found_line = None
                self.viewport().update()
            self.searched.emit(found >= 0)
            return

    def _stop_search(self) -> None:
        self._timer.stop()
        self._search = None

    def _show_line(self, line: int) -> None:
        self.found_line = line
        row, top = self.shown.row_of(line), self.verticalScrollBar().value()
        if row is None:  # a match that the level hides
            self.show_level("all")
            row = self.shown.row_of(line) or 0
        if not top <= row < top + self.visible_lines():
            if self.is_following:
                self.is_following = False
                self.follow_changed.emit(False)
            self._move_to(row - self.visible_lines() // 2)
        self.viewport().update()

    # ------------------------------------------------------------ painting

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, area = QPainter(self.viewport()), self.viewport().rect()
        if not len(self.shown):
            empty = "No warnings or errors" if self.document.num_lines else _NOTHING
            self._painter.paint_nothing(painter, area, empty)
            return
        top = self.verticalScrollBar().value()
        # One more: the last line may be cut by the lower edge.
        end = min(top + self.visible_lines() + 1, len(self.shown))
        room_chars = self._painter.paint(
            painter,
            area,
            self.document,
            [self.shown.number(row) for row in range(top, end)],
            Marks(is_marked=self._is_marked, words=self._query, found_line=self.found_line),
            skipped_chars=self.horizontalScrollBar().value(),
        )
        # From the lines painted so far: measuring all of them would take a pass over the log.
        self.horizontalScrollBar().setRange(0, max(self._painter.widest_chars - room_chars + 2, 0))

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._grow()

    # ------------------------------------------------------------ selection

    def _line_at(self, y: float) -> int:
        row = int(y - PAD_PX // 2) // self._painter.line_px
        return self.shown.number(self.verticalScrollBar().value() + row)

    def _is_marked(self, line: int) -> bool:
        return self._marked is not None and min(self._marked) <= line <= max(self._marked)

    def marked_text(self) -> str:
        """Return the selected lines that are shown."""
        if self._marked is None:
            return ""
        first = max(min(self._marked), self.document.first_line)
        last = min(max(self._marked), self.document.end_line - 1, first + MAX_COPY_LINES)
        numbers = (number for number in range(first, last + 1) if self._is_shown(number))
        return "\n".join(map(self.document.line, numbers))

    def _is_shown(self, number: int) -> bool:
        return self.shown.row_of(number) is not None

    def mousePressEvent(self, event: QMouseEvent) -> None:
        line = self._line_at(event.position().y())
        extends = event.modifiers() & Qt.KeyboardModifier.ShiftModifier and self._marked
        self._marked = (self._marked[0], line) if extends and self._marked else (line, line)
        self.viewport().update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._marked is not None and event.buttons() & Qt.MouseButton.LeftButton:
            self._marked = (self._marked[0], self._line_at(event.position().y()))
            self.viewport().update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        bar = self.verticalScrollBar()
        moves = {
            Qt.Key.Key_Home: 0,
            Qt.Key.Key_End: bar.maximum(),
            Qt.Key.Key_Up: bar.value() - 1,
            Qt.Key.Key_Down: bar.value() + 1,
            Qt.Key.Key_PageUp: bar.value() - self.visible_lines(),
            Qt.Key.Key_PageDown: bar.value() + self.visible_lines(),
        }
        if event.matches(QKeySequence.StandardKey.Copy):
            QApplication.clipboard().setText(self.marked_text())
        elif event.matches(QKeySequence.StandardKey.SelectAll):
            self._marked = (self.document.first_line, max(self.document.end_line - 1, 0))
            self.viewport().update()
        elif Qt.Key(event.key()) in moves:
            bar.setValue(moves[Qt.Key(event.key())])
        else:
            super().keyPressEvent(event)

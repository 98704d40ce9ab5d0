"""A row that wraps onto more lines when space is tight, so that no widget is cut."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtWidgets import QLayout, QLayoutItem, QWidget


class FlowLayout(QLayout):
    """Places widgets from left to right on as many lines as they need.

    With a `lead`, that widget starts the first line and takes its spare width, which aligns the
    others to the right. Without one, the widgets of a line share its spare width evenly.
    """

    def __init__(
        self, *, lead: QWidget | None = None, gap_px: int = 8, line_gap_px: int = 8
    ) -> None:
        super().__init__()
        self._items: list[QLayoutItem] = []
        self._gap_px, self._line_gap_px = gap_px, line_gap_px
        self._has_lead = lead is not None
        if lead is not None:
            self.addWidget(lead)
        self.setContentsMargins(0, 0, 0, 0)

    # ------------------------------------------------------------ QLayout

    def addItem(self, item: QLayoutItem) -> None:
        self._items.append(item)

    def count(self) -> int:
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:
        return Qt.Orientation.Horizontal

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        lines = self._lines(width)
        gaps = max(len(lines) - 1, 0) * self._line_gap_px
        return sum(map(_height, lines)) + gaps

    def sizeHint(self) -> QSize:
        shown = [item.sizeHint() for item in self._items if not item.isEmpty()]
        gaps = max(len(shown) - 1, 0) * self._gap_px
        height = max((size.height() for size in shown), default=0)
        return QSize(sum(size.width() for size in shown) + gaps, height)

    # One widget per line is the narrowest layout, so the widest widget decides.
    def minimumSize(self) -> QSize:
        shown = [item for item in self._items if not item.isEmpty()]
        width = max((self._min_width(item) for item in shown), default=0)
        return QSize(width, max((item.minimumSize().height() for item in shown), default=0))

    def setGeometry(self, area: QRect) -> None:
        super().setGeometry(area)
        top = area.top()
        for number, line in enumerate(self._lines(area.width())):
            height = _height(line)
            self._lay_line(line, QRect(area.left(), top, area.width(), height), number == 0)
            top += height + self._line_gap_px

    # ------------------------------------------------------------ lines

    def _min_width(self, item: QLayoutItem) -> int:
        # The lead may shrink to its minimum; the others keep the width that they ask for.
        is_lead = self._has_lead and item is self._items[0]
        return item.minimumSize().width() if is_lead else item.sizeHint().width()

    def _lines(self, width: int) -> list[list[QLayoutItem]]:
        lines: list[list[QLayoutItem]] = []
        used = 0
        for item in self._items:
            if item.isEmpty():
                continue
            wanted = self._min_width(item)
            if lines and used + self._gap_px + wanted <= width:
                lines[-1].append(item)
                used += self._gap_px + wanted
            else:
                lines.append([item])
                used = wanted
        return lines

    def _lay_line(self, line: list[QLayoutItem], area: QRect, is_first: bool) -> None:
        widths = [self._min_width(item) for item in line]
        spare = max(area.width() - sum(widths) - (len(line) - 1) * self._gap_px, 0)
        left = area.left()
        if not self._has_lead:
            widths = [width + spare // len(line) for width in widths]
        elif is_first and line[0] is self._items[0]:
            widths[0] += spare
        else:
            left += spare
        for item, width in zip(line, widths, strict=True):
            height = min(item.sizeHint().height(), area.height())
            top = area.top() + (area.height() - height) // 2
            item.setGeometry(QRect(QPoint(left, top), QSize(width, height)))
            left += width + self._gap_px


def _height(line: list[QLayoutItem]) -> int:
    return max(item.sizeHint().height() for item in line)

"""One table model for all tables: rows are any values, columns are data.

Rows have keys. `put`, `drop` and `reset` change rows one by one instead of resetting the model, so
that selection, current cell and scroll position survive while figures change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.gui.kit.primitives import make_tooltip
from app.text import show_foreign

T = TypeVar("T")
Index = QModelIndex | QPersistentModelIndex
SORT_ROLE = int(Qt.ItemDataRole.UserRole)
STATUS_ROLE = SORT_ROLE + 1
"""A Status, drawn with its glyph and colour."""
PROGRESS_ROLE = SORT_ROLE + 2
"""A share from 0 to 1, drawn as a bar next to the text."""
SPLIT_ROLE = SORT_ROLE + 3
"""Shares of a whole, drawn as one stacked bar; the text is the tooltip."""
WORDS_ROLE = SORT_ROLE + 4
"""Text that a filter searches, the same for every cell of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column(Generic[T]):
    title: str
    text: Callable[[T], str]
    sort: Callable[[T], Any] | None = None
    """Key to sort by; None for the text."""
    tip: str = ""
    """Tooltip of the header."""
    is_number: bool = False
    """True if the text is aligned to the right."""
    width_px: int = 120
    """Initial width; the minimum for a column that stretches."""
    stretches: bool = False
    """True if the column takes a share of the spare width."""
    status: Callable[[T], Any] | None = None
    progress: Callable[[T], float | None] | None = None
    split: Callable[[T], tuple[float, ...]] | None = None


def unknown_first(value: float | None) -> float:
    """Return a sort key that puts unknown values below all others."""
    return -math.inf if value is None or math.isnan(value) else value


def number_column(
    title: str,
    read: Callable[[T], float | None],
    show: Callable[[Any], str],
    *,
    width_px: int,
    tip: str = "",
) -> Column[T]:
    """Return a column of figures: right-aligned, and sorted by value with unknown ones first."""
    return Column(
        title=title,
        text=lambda row: show(read(row)),
        sort=lambda row: unknown_first(read(row)),
        tip=tip,
        is_number=True,
        width_px=width_px,
    )


class RowsModel(QAbstractTableModel, Generic[T]):
    """Rows by key, in insertion order; views sort through a proxy."""

    def __init__(
        self,
        columns: Sequence[Column[T]],
        key: Callable[[T], Any],
        words: Callable[[T], str] = lambda row: "",
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.columns = tuple(columns)
        self._key = key
        # Text that a filter searches besides the columns' own.
        self._words = words
        self._rows: list[T] = []
        self._places: dict[Any, int] = {}

    # ------------------------------------------------------------ rows

    def rows(self) -> list[T]:
        return list(self._rows)

    def row(self, index: int) -> T:
        return self._rows[index]

    def place_of(self, key: Any) -> int | None:
        """Return the row number of a key."""
        return self._places.get(key)

    def put(self, row: T) -> None:
        """Replace the row with the same key, or append it."""
        place = self._places.get(self._key(row))
        if place is None:
            self.beginInsertRows(QModelIndex(), len(self._rows), len(self._rows))
            self._places[self._key(row)] = len(self._rows)
            self._rows.append(row)
            self.endInsertRows()
        elif self._rows[place] != row:  # an equal row repaints nothing
            self._rows[place] = row
            self.touch(place)

    def touch(self, place: int) -> None:
        """Repaint a row whose texts changed although its value did not, such as an age."""
        last = self.index(place, len(self.columns) - 1)
        self.dataChanged.emit(self.index(place, 0), last)

    def drop(self, key: Any) -> None:
        """Remove the row with this key, if there is one."""
        place = self._places.get(key)
        if place is None:
            return
        self.beginRemoveRows(QModelIndex(), place, place)
        del self._rows[place]
        # The rows below have moved up.
        self._places = {self._key(row): number for number, row in enumerate(self._rows)}
        self.endRemoveRows()

    def reset(self, rows: Sequence[T]) -> None:
        """Replace all rows with `rows`, keeping the ones that did not change."""
        keys = {self._key(row) for row in rows}
        for key in [key for key in self._places if key not in keys]:
            self.drop(key)
        for row in rows:
            self.put(row)

    # ------------------------------------------------------------ Qt

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 - Qt's own signature
        # A valid parent is a row, and the rows of a table have none below them.
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 - Qt's own signature
        return 0 if parent.isValid() else len(self.columns)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        column, row = self.columns[index.column()], self._rows[index.row()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            text = column.status(row).text if column.status else column.text(row)
            return show_foreign(text)
        if role == Qt.ItemDataRole.ToolTipRole:
            return make_tooltip(column.status(row).text if column.status else column.text(row))
        if role == SORT_ROLE:
            return column.sort(row) if column.sort else self.data(index).casefold()
        if role == STATUS_ROLE:
            return column.status(row) if column.status else None
        if role == WORDS_ROLE:
            return " ".join((*(one.text(row) for one in self.columns), self._words(row)))
        if role == PROGRESS_ROLE:
            return column.progress(row) if column.progress else None
        if role == SPLIT_ROLE:
            return (column.split(row) or None) if column.split else None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if column.is_number else Qt.AlignmentFlag.AlignLeft
            return int(side | Qt.AlignmentFlag.AlignVCenter)
        return None

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        column = self.columns[section]
        if role == Qt.ItemDataRole.DisplayRole:
            return column.title
        if role == Qt.ItemDataRole.ToolTipRole:
            return make_tooltip(f"{column.title}: {column.tip}" if column.tip else column.title)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if column.is_number else Qt.AlignmentFlag.AlignLeft
            return int(side | Qt.AlignmentFlag.AlignVCenter)
        return None

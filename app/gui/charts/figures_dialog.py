"""The points of a chart as a table, read from the arrays in place, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PySide6.QtCore import QAbstractTableModel, QModelIndex, Qt
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QHBoxLayout,
    QHeaderView,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.gui.charts.limits import Limits
from app.gui.charts.line import LineSeries
from app.gui.charts.table import format_table
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label, make_tooltip
from app.gui.kit.theme import Theme
from app.gui.tables.rows_model import Index
from app.gui.tables.view import ROW_HEIGHT_PX, CellDelegate
from app.telemetry.history import Array
from app.text import DASH, count_of, show_foreign

Write = Callable[[float | None], str]
TITLES = ("Line", "Step", "Attempt", "Value")


class FiguresModel(QAbstractTableModel):
    """Every point in view, one row each: line, step, attempt, value."""

    def __init__(self, lines: Sequence[LineSeries], view: Limits, write: Write) -> None:
        super().__init__()
        self._write = write
        # Views of the arrays, not copies: a run may have millions of points.
        self._parts: list[tuple[str, int, Array, Array]] = []
        for line in lines:
            for attempt in line.curves.attempts:
                series = line.curves.series(attempt)
                first = int(np.searchsorted(series.x, view.low))
                end = int(np.searchsorted(series.x, view.high, side="right"))
                if end > first:
                    x, y = series.x[first:end], series.y[first:end]
                    self._parts.append((line.name, attempt, x, y))
        self._ends = np.cumsum([len(x) for _, _, x, _ in self._parts], dtype=np.int64)

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 - Qt's own signature
        return 0 if parent.isValid() or not len(self._ends) else int(self._ends[-1])

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 - Qt's own signature
        return 0 if parent.isValid() else len(TITLES)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if role == Qt.ItemDataRole.DisplayRole:
            return show_foreign(self._text(index.row(), index.column()))
        if role == Qt.ItemDataRole.ToolTipRole:
            return make_tooltip(self._text(index.row(), index.column()))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _side(index.column())
        return None

    def _text(self, row: int, column: int) -> str:
        # Each end is the number of rows up to and including that part.
        part = int(np.searchsorted(self._ends, row, side="right"))
        name, attempt, x, y = self._parts[part]
        place = row - (int(self._ends[part - 1]) if part else 0)
        if column == 1:
            return f"{x[place]:,.0f}"
        if column == 3:
            return DASH if np.isnan(y[place]) else self._write(float(y[place]))
        return name if column == 0 else f"{attempt}"

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return TITLES[section]
        if role == Qt.ItemDataRole.ToolTipRole:
            return make_tooltip(TITLES[section])
        return _side(section) if role == Qt.ItemDataRole.TextAlignmentRole else None


class FiguresDialog(QDialog):
    """Shows the points as they were when it opened; a table that grows cannot be read."""

    def __init__(
        self,
        theme: Theme,
        parent: QWidget,
        title: str,
        lines: Sequence[LineSeries],
        view: Limits,
        write: Write,
    ) -> None:
        super().__init__(parent)
        # Its parent, the plot, lives on, and the rows are views of large arrays.
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(title)
        self.resize(560, 560)
        self.model = FiguresModel(lines, view, write)
        self.table = _make_table(theme, self.model, f"Values of {title}")
        several = any(len(line.curves.attempts) > 1 for line in lines)
        # A column that says the same in every row only takes width from the others.
        self.table.setColumnHidden(0, len(lines) == 1)
        self.table.setColumnHidden(2, not several)
        foot = QHBoxLayout()
        foot.setSpacing(8)
        foot.addWidget(
            Button(
                theme,
                "Copy as text",
                lambda: copy_to_clipboard(format_table(lines, view)),
                icon="copy",
                tip="Copy all values as columns for a spreadsheet",
            )
        )
        foot.addStretch(1)
        foot.addWidget(Button(theme, "Close", self.accept))
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label(title, "heading"))
        steps = f"steps {view.low:,.0f} to {view.high:,.0f}"
        many = count_of(self.model.rowCount(), "value")
        column.addWidget(make_label(f"Snapshot of {steps}: {many}.", "muted"))
        column.addWidget(self.table, 1)
        column.addLayout(foot)


def _make_table(theme: Theme, model: FiguresModel, name: str) -> QTableView:
    table = QTableView()
    table.setModel(model)
    table.setItemDelegate(CellDelegate(theme, table))
    table.setAccessibleName(name)
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
    table.setShowGrid(False)
    table.setTabKeyNavigation(False)
    table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
    table.verticalHeader().setDefaultSectionSize(ROW_HEIGHT_PX)
    table.verticalHeader().hide()
    table.horizontalHeader().setHighlightSections(False)
    table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
    if model.rowCount():
        # Column 1: column 0 may be hidden.
        table.setCurrentIndex(model.index(0, 1))
    return table


def _side(column: int) -> int:
    side = Qt.AlignmentFlag.AlignRight if column else Qt.AlignmentFlag.AlignLeft
    return int(side | Qt.AlignmentFlag.AlignVCenter)

"""List of rows: filter, search, table, and the way to later rows."""

from __future__ import annotations

from PySide6.QtCore import QTimer, Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from agents.contract.requests.rows import RowBrief, RowFilter, RowList
from app.gui.kit.inputs import ChoiceBox, NumberBox
from app.gui.kit.primitives import IconButton, make_label, set_tooltip
from app.gui.kit.theme import Theme
from app.gui.tables.data_columns import data_columns
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView
from app.presentation.rows_text import FILTERS

ROWS_PER_PAGE = 200
_NUMBER_PX = 130
SEARCH_MS = 300
"""Pause in typing before a search, in milliseconds."""


class RowsPane(QWidget):
    wanted = Signal()
    """Other rows are wanted: those from `start` on that `which` and `text` name."""
    row_chosen = Signal(object)
    """The chosen row, a RowBrief; None: there is none to choose."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._list = RowList(rows=(), num_rows=0, is_whole=True)
        self._is_filling = False
        self.start = 0
        """Number of rows before the first one of the page."""
        self.filter = ChoiceBox()
        self.filter.setAccessibleName("Rows to list")
        self.filter.setMinimumContentsLength(20)
        for name, words in FILTERS.items():
            self.filter.addItem(words, name)
        self.search = QLineEdit()
        self.search.setPlaceholderText("Search")
        self.search.setAccessibleName("Search the rows")
        self.search.setClearButtonEnabled(True)
        self.rows: RowsModel[RowBrief] = RowsModel(data_columns(), key=lambda row: row.place)
        self.table = TableView(theme, self.rows, "Rows")
        self.place = make_label("", "caption")
        self.go_to = NumberBox(minimum=1, maximum=2**31 - 1)
        self.go_to.setAccessibleName("First row to list")
        self.go_to.setMaximumWidth(_NUMBER_PX)
        set_tooltip(self.go_to, "First row to list")
        self.earlier = IconButton(theme, "up", "Earlier rows", lambda: self._step(-1))
        self.later = IconButton(theme, "down", "Later rows", lambda: self._step(1))
        self._typing = QTimer(self, interval=SEARCH_MS, singleShot=True)
        self._lay_out()
        self.filter.currentIndexChanged.connect(lambda index: self._want(0))
        self.search.textChanged.connect(lambda text: self._typing.start())
        self._typing.timeout.connect(lambda: self._want(0))
        self.go_to.editingFinished.connect(lambda: self._want(self.go_to.value() - 1))
        self.table.chosen.connect(self._choose)

    @property
    def which(self) -> RowFilter:
        """Filter of the list."""
        chosen: RowFilter = self.filter.currentData()
        return chosen

    @property
    def text(self) -> str:
        """Text that each row contains; empty: any row."""
        return self.search.text().strip()

    @property
    def is_whole(self) -> bool:
        """True if no other row matches."""
        return self._list.is_whole

    def clear(self) -> None:
        """Forget the rows, the filter and the search; `wanted` is not emitted."""
        self.start = 0
        for box in (self.filter, self.search):
            box.blockSignals(True)
        self.filter.setCurrentIndex(0)
        self.search.clear()
        for box in (self.filter, self.search):
            box.blockSignals(False)
        self._typing.stop()
        self._fill(RowList(rows=(), num_rows=0, is_whole=False))
        self.place.setText("")
        self.table.say_when_empty("")

    def show_list(self, found: RowList) -> None:
        """Show rows; those that are still listed keep selection and scroll position."""
        chosen = self.table.selected()
        self._fill(found)
        if chosen is not None and self.rows.place_of(chosen.place) is not None:
            if self.table.selected() is None:
                self.table.select(chosen.place)
        elif found.rows:
            self.table.select(found.rows[0].place)
        else:
            self.row_chosen.emit(None)

    def _fill(self, found: RowList) -> None:
        self._list, self._is_filling = found, True
        if [row.place for row in found.rows] != [row.place for row in self.rows.rows()]:
            self.rows.reset([])
        self.rows.reset(found.rows)
        self._is_filling = False
        has_files = any(row.file for row in found.rows)
        self.table.setColumnHidden(len(self.rows.columns) - 1, not has_files)
        self._show_place()

    def _lay_out(self) -> None:
        filters = QHBoxLayout()
        filters.setSpacing(8)
        filters.addWidget(self.filter)
        filters.addWidget(self.search, 1)
        foot = QHBoxLayout()
        foot.setSpacing(8)
        foot.addWidget(self.place, 1)
        foot.addWidget(make_label("From", "caption"))
        for widget in (self.go_to, self.earlier, self.later):
            foot.addWidget(widget)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addLayout(filters)
        column.addWidget(self.table, 1)
        column.addLayout(foot)

    def _step(self, pages: int) -> None:
        self._want(max(0, self.start + pages * ROWS_PER_PAGE))

    def _want(self, start: int) -> None:
        self._typing.stop()
        self.start = start
        self.wanted.emit()

    def _choose(self) -> None:
        chosen = self.table.selected()
        # Rows that leave the table move the selection to their neighbors.
        if chosen is not None and not self._is_filling:
            self.row_chosen.emit(chosen)

    def _show_place(self) -> None:
        found, shown = self._list, len(self._list.rows)
        more = "" if found.is_whole else " so far"
        first = self.start + 1
        words = f"{first:,} to {self.start + shown:,} of {found.num_rows:,}{more}"
        self.place.setText(words if shown else f"No such rows{more}")
        self.table.say_when_empty("" if shown else f"No such rows{more}")
        self.earlier.setEnabled(self.start > 0)
        self.later.setEnabled(self.start + shown < found.num_rows)
        self.go_to.blockSignals(True)
        self.go_to.setValue(first)
        self.go_to.blockSignals(False)

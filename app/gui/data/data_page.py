"""Data page: choose data, look through its rows, and hand a mapping of columns to a new run.

The first rows come at once. While all rows are read, their numbers are asked for again and again;
a hidden page asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QHBoxLayout,
    QSplitter,
    QStackedWidget,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from agents.contract.requests.rows import DataFigures, RowBrief, RowList
from agents.contract.spec import DataSpec, RunSpec
from app.core.data import ListDataRows, ReadDataFigures, ShowDataRow
from app.data.browser import BrowsedData
from app.errors import RacklessError, UserError
from app.gui.data.columns_pane import ColumnsPane
from app.gui.data.numbers_pane import NumbersPane
from app.gui.data.row_pane import RowPane
from app.gui.data.rows_pane import ROWS_PER_PAGE, RowsPane
from app.gui.data.source_bar import SourceBar
from app.gui.kit.banner import Banner
from app.gui.kit.empty import EmptyState
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, ElidedLabel, make_label, set_page_margins, set_tooltip
from app.gui.new_run.data_offer import show_offer
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.planning.advice.changes import apply_change
from app.presentation.rows_text import sum_up

REFRESH_MS = 500
"""Time between two requests for the numbers while rows are read, in milliseconds."""
_UNUSED_MODEL = "-"


class DataPage(QWidget):
    run_wanted = Signal(object)
    """Spec whose data, and model if one is chosen, a new run takes over."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._source: BrowsedData | None = None
        self._figures = DataFigures()
        self._ops: dict[str, Op] = {}
        self.banner = Banner(context.theme)
        self.bar = SourceBar(context.theme)
        self.sources = ChoiceBox()
        self.sources.setAccessibleName("Source")
        set_tooltip(self.sources, "Source of the run whose rows are shown")
        self.sources.setMinimumContentsLength(18)
        self.summary = ElidedLabel("", "muted")
        self.use = Button(
            context.theme,
            "Use in a new run",
            self._use,
            icon="add",
            role="primary",
            tip="Fill in a new run with this data and the meanings of its columns",
        )
        self.list = RowsPane(context.theme)
        self.row = RowPane(context.theme)
        self.numbers = NumbersPane(context.theme)
        self.columns = ColumnsPane()
        self.stack = QStackedWidget()
        self._refresh = QTimer(self, interval=REFRESH_MS, singleShot=True)
        self._lay_out()
        self._connect()
        self._show_source()

    # ------------------------------------------------------------ layout

    def _lay_out(self) -> None:
        theme = self._context.theme
        head = QHBoxLayout()
        head.setSpacing(12)
        head.addWidget(make_label("Data", "title"))
        head.addWidget(self.sources)
        head.addWidget(self.summary, 1)
        head.addWidget(self.use)
        self.stack.addWidget(
            EmptyState(
                theme,
                "data",
                "Look through your data",
                "See every row as a model learns it, find rows that are left out, cut or repeated, "
                "and choose what each column means.",
                (
                    Button(theme, "Choose a file\u2026", self.bar.choose_file, role="primary"),
                    Button(theme, "Choose a folder\u2026", self.bar.choose_folder),
                ),
            )
        )
        self.stack.addWidget(self._make_split())
        column = QVBoxLayout(self)
        set_page_margins(column, self)
        column.addLayout(head)
        column.addWidget(self.bar)
        column.addWidget(self.banner)
        column.addWidget(self.stack, 1)

    def _make_split(self) -> QSplitter:
        self.tabs = QTabWidget()
        self.tabs.tabBar().setAccessibleName("Details")
        self.tabs.addTab(self.row, "Row")
        self.tabs.addTab(self.numbers, "All rows")
        self.tabs.addTab(self.columns, "Columns")
        split = QSplitter(Qt.Orientation.Horizontal)
        split.addWidget(self.list)
        split.addWidget(self.tabs)
        split.setSizes([680, 460])
        split.setChildrenCollapsible(False)
        split.setHandleWidth(16)
        return split

    def _connect(self) -> None:
        self.bar.wanted.connect(self._open)
        self.sources.activated.connect(lambda place: self._show(self.sources.itemData(place)))
        self.list.wanted.connect(self._ask_rows)
        self.list.row_chosen.connect(self._show_row)
        self.columns.chosen.connect(self._map_columns)
        self._refresh.timeout.connect(self._ask_figures)

    # ------------------------------------------------------------ source

    def open_source(self, spec: RunSpec) -> None:
        """Look through the data of a run, its first source first."""
        self._show(BrowsedData(spec=spec))

    def _show(self, source: BrowsedData) -> None:
        model = source.spec.model
        self.bar.show_names(source.name, "" if model == _UNUSED_MODEL else model)
        self._source = source
        self._figures = DataFigures()
        self.banner.hide()
        self._show_source()
        self._ask_rows()

    def _open(self, name: str, model: str) -> None:
        if not name:
            self.banner.show_message("warning", "Choose a file or a folder with data first.")
            return
        model = model or _UNUSED_MODEL
        data = DataSpec(train=name)
        known = self._source or BrowsedData(spec=RunSpec(model=model, data=data))
        if known.name != name:  # its columns are others
            known = BrowsedData(spec=replace(known.spec, data=data))
        spec = replace(known.spec, model=model)
        self._show(replace(known, spec=spec, num_opened=known.num_opened + 1))

    def _map_columns(self, entries: list[str]) -> None:
        if self._source is not None:
            self._show(self._source.map_columns(entries))

    def _use(self) -> None:
        if self._source is not None:
            self.run_wanted.emit(self._source.spec)

    # ------------------------------------------------------------ rows

    def _ask_rows(self) -> None:
        if self._source is None:
            return
        self._replace_op(
            "rows",
            self._context.bridge.do(
                ListDataRows(
                    source=self._source,
                    start=self.list.start,
                    count=ROWS_PER_PAGE,
                    which=self.list.which,
                    search=self.list.text,
                ),
                self._take_rows,
                self._fail,
            ),
        )

    def _ask_figures(self) -> None:
        if self._source is None or not self.isVisible():
            return
        self._replace_op(
            "figures",
            self._context.bridge.do(
                ReadDataFigures(source=self._source), self._take_figures, self._fail
            ),
        )

    def _show_row(self, chosen: RowBrief | None) -> None:
        if self._source is None or chosen is None:
            self._forget_op("row")
            self.row.show_row(None)
            return
        self._replace_op(
            "row",
            self._context.bridge.do(
                ShowDataRow(source=self._source, place=chosen.place), self.row.show_row, self._fail
            ),
        )

    def _replace_op(self, name: str, op: Op) -> None:
        """Only the newest answer of each kind counts."""
        self._forget_op(name)
        self._ops[name] = op

    def _forget_op(self, name: str) -> None:
        if (old := self._ops.get(name)) is not None and not old.is_done:
            # Not cancelled: that would end the process which answers in order.
            old.callbacks.success = None

    def _take_rows(self, found: RowList) -> None:
        self.list.show_list(found)
        self._refresh.start()

    def _take_figures(self, found: DataFigures) -> None:
        old, self._figures = self._figures, found
        self._show_figures()
        if found.problem:
            self.banner.show_message("warning", "Not all rows could be read", found.problem)
            return
        if found.has_nothing and found.offer:
            self._fail(UserError("No row can be read by the names of its columns", found.offer))
        # Rows get their numbers and states while all are read; a search looks further.
        if old != found or not self.list.is_whole:
            self._ask_rows()
        elif not found.is_whole:
            self._refresh.start()

    def _fail(self, error: RacklessError) -> None:
        source = self._source
        if source is None or not show_offer(self.banner, error, source.spec.data, self._take_offer):
            self.banner.show_error(error)
        if source is not None and not self._figures.num_rows:
            self.summary.setText(source.source.name)

    def _take_offer(self, change: Mapping[str, object]) -> None:
        if self._source is not None:
            self._show(replace(self._source, spec=apply_change(self._source.spec, change)))

    # ------------------------------------------------------------ what is shown

    def _show_source(self) -> None:
        has_source = self._source is not None
        self.stack.setCurrentIndex(int(has_source))
        self.use.setEnabled(has_source)
        others = self._source.list_others() if self._source is not None else ()
        self.sources.clear()
        for other in others:
            words = "Evaluation: " if other.part == "eval" else ""
            self.sources.addItem(f"{words}{other.source.name}", other)
        self.sources.setCurrentIndex(others.index(self._source) if self._source else -1)
        self.sources.setVisible(len(others) > 1)
        self.list.clear()
        self.row.show_row(None)
        self._show_figures()

    def _show_figures(self) -> None:
        if self._source is None:
            self.summary.setText("")
            return
        source, found = self._source, self._figures
        name = f"{source.source.name} \u00b7 " if self.sources.count() < 2 else ""
        self.summary.setText(f"{name}{sum_up(found)}")
        self.numbers.show_figures(found, source.spec.sequence_tokens)
        if found.columns:
            self.columns.show_columns(found.columns, source.columns)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._source is not None and not self._figures.is_whole:
            self._refresh.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._refresh.stop()

"""Runs page: every fine-tuning run, newest first."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QStackedWidget, QVBoxLayout, QWidget

from app.events import RunSnapshot
from app.flows.compare import MOST_RUNS
from app.gui.kit.actions import Actions
from app.gui.kit.banner import Banner
from app.gui.kit.empty import EmptyState, Waiting
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, make_label, set_page_margins
from app.gui.runs.found_pane import FoundPane
from app.gui.runs.run_actions import RunActions, can_delete, can_resume, can_stop
from app.gui.session.context import Context
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.run_columns import run_columns
from app.gui.tables.view import TableView, make_filter


class RunsPage(QWidget):
    run_opened = Signal(str)
    repeat_wanted = Signal(object)
    """RunSnapshot whose settings a new run should start from."""
    compare_wanted = Signal(list)
    """RunSnapshots to compare, at least two."""

    def __init__(self, context: Context, actions: Actions) -> None:
        super().__init__()
        self._context = context
        self.banner = Banner(context.theme)
        self.run_actions = RunActions(context, self, self.banner)
        self.model: RowsModel[RunSnapshot] = RowsModel(
            run_columns(context.cluster.now_s),
            key=lambda run: run.run_id,
            # The filter searches these words, too: users look for a run by its model.
            words=lambda run: f"{run.spec.model} {run.spec.adapter.kind} {run.run_id}",
        )
        self.table = TableView(context.theme, self.model, "Runs")
        self.table.sort_by("Started", Qt.SortOrder.DescendingOrder)
        self.table.select_several()
        self.filter = make_filter(self.table, "Filter by name, state, model or node")
        self._buttons = self._make_buttons()
        self._stack = QStackedWidget()
        self._stack.addWidget(
            EmptyState(
                context.theme,
                "runs",
                "No runs yet",
                "A run fine-tunes a model on your data, on one or more of your PCs. It continues "
                "when this window is closed, and you can stop and resume it.",
                [actions.button("new_run", role="primary"), actions.button("open_run_file")],
            )
        )
        self._stack.addWidget(self.table)
        self._stack.addWidget(Waiting("Looking for your runs\u2026"))
        column = QVBoxLayout(self)
        set_page_margins(column, self)
        head = FlowLayout(lead=make_label("Runs", "title"))
        head.addWidget(self.filter)
        for button in self._buttons.values():
            head.addWidget(button)
        self._new = actions.button("new_run", role="primary")
        head.addWidget(self._new)
        column.addLayout(head)
        column.addWidget(self.banner)
        self.found = FoundPane(context, self, self.banner)
        column.addWidget(self.found)
        column.addWidget(self._stack, 1)
        context.cluster.run_changed.connect(self._show)
        context.cluster.run_deleted.connect(self._remove_row)
        context.cluster.is_open_changed.connect(self._choose)
        self.table.chosen.connect(self._choose)
        self.table.opened.connect(self._open)
        self._choose()

    def _make_buttons(self) -> dict[str, Button]:
        theme = self._context.theme
        return {
            "delete": Button(
                theme,
                "Delete",
                self._delete,
                icon="delete",
                role="danger",
                tip="Delete the selected run and its checkpoints",
            ),
            "stop": Button(
                theme,
                "Stop",
                self._stop,
                icon="stop",
                tip="Write a checkpoint, then end the selected run on every node",
            ),
            "resume": Button(
                theme,
                "Resume\u2026",
                self._resume,
                icon="resume",
                tip="Continue from a checkpoint, on the same or different nodes",
            ),
            "repeat": Button(
                theme,
                "New run like this\u2026",
                self._repeat,
                icon="copy",
                tip="Start a new run with the settings of the selected run",
            ),
            "compare": Button(
                theme,
                "Compare",
                self._compare,
                tip="Compare the curves and settings of the selected runs (hold Ctrl to select "
                "several)",
            ),
            "open": Button(theme, "Open", self._open, tip="Show the selected run (Enter)"),
        }

    def _show(self, run_id: str) -> None:
        run = self._context.cluster.current_run(run_id)
        if run is not None:
            self.model.put(run)
        self._choose()

    def _remove_row(self, run_id: str) -> None:
        self.model.drop(run_id)
        self._choose()

    def _choose(self) -> None:
        is_known = self._context.cluster.is_open
        # Before the core is open, no runs are known yet, which does not mean that there are none.
        self._stack.setCurrentIndex(1 if self.model.rows() else 0 if is_known else 2)
        run = self.table.selected()
        for name, is_possible in (
            ("open", run is not None),
            ("repeat", run is not None),
            ("stop", run is not None and can_stop(run)),
            ("resume", run is not None and can_resume(run)),
            ("delete", run is not None and can_delete(run)),
        ):
            self._buttons[name].setEnabled(is_possible)
        count = len(self.table.all_selected())
        # More curves than this cannot be told apart by colour and dash.
        self._buttons["compare"].setEnabled(2 <= count <= MOST_RUNS)
        for widget in (*self._buttons.values(), self.filter):
            widget.setVisible(bool(self.model.rows()))
        # An empty page has its own button in the middle.
        self._new.setVisible(bool(self.model.rows()) or not is_known)

    def _open(self) -> None:
        run = self.table.selected()
        if run is not None:
            self.run_opened.emit(run.run_id)

    def _compare(self) -> None:
        self.compare_wanted.emit(self.table.all_selected())

    def _repeat(self) -> None:
        run = self.table.selected()
        if run is not None:
            self.repeat_wanted.emit(run)

    def _stop(self) -> None:
        run = self.table.selected()
        if run is not None:
            self.run_actions.stop(run)

    def _resume(self) -> None:
        run = self.table.selected()
        if run is not None:
            self.run_actions.resume(run)

    def _delete(self) -> None:
        run = self.table.selected()
        if run is not None:
            self.run_actions.delete(run)

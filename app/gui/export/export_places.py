"""Choice of the node that runs an export, and of the output folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QTimer, Signal
from PySide6.QtWidgets import (
    QButtonGroup,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from app.core.action import CoreApi
from app.core.artifacts import CheckExportFolders, PlanExport
from app.errors import RacklessError, describe_error
from app.flows.export import ExportAnswers, PlaceRow, join_places, list_jobs
from app.gui.export.export_calibration import WAIT_MS
from app.gui.forms.answer_field import TICK_INDENT_PX
from app.gui.kit.primitives import Button, make_label, make_scroll_area
from app.gui.session.bridge import Op, Report
from app.gui.session.context import Context

if TYPE_CHECKING:
    from app.artifacts.estimates.plan import ExportPlan


NO_NODE = "No node can run this export now."


class PlacesPage(QWidget):
    edited = Signal()

    def __init__(self, context: Context, run_id: str) -> None:
        super().__init__()
        self._context, self._run_id = context, run_id
        self._answers = ExportAnswers()
        self._ops: dict[str, Op] = {}
        self._node_problem = self._folder_problem = ""
        self._group = QButtonGroup(self)
        self.nodes: dict[str, QRadioButton] = {}
        self._wanted = ""
        self.folder = QLineEdit()
        self.folder.setAccessibleName("Output folder")
        # `textEdited`, not `textChanged`: restoring an answer in `choose` is no edit.
        self.folder.textEdited.connect(lambda text: self._type())
        # Checking a folder may touch a slow drive: wait for a pause in typing.
        self._look_soon = QTimer(self, interval=WAIT_MS, singleShot=True)
        self._look_soon.timeout.connect(lambda: self.look_at_folder(self._answers))
        self._rows = QVBoxLayout()
        self._rows.setSpacing(2)
        self._note = make_label(
            "Estimating time and memory on each node\u2026", "muted", wraps=True
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(make_label("Node", "subheading"))
        column.addWidget(self._note)
        body = QWidget()
        body.setObjectName("content")
        rows = QVBoxLayout(body)
        rows.setContentsMargins(0, 0, 8, 0)
        rows.addLayout(self._rows)
        rows.addStretch(1)
        column.addWidget(make_scroll_area(body), 1)
        column.addWidget(make_label("Output folder on this PC", "subheading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.folder, 1)
        row.addWidget(Button(context.theme, "Choose\u2026", self._browse, icon="folder"))
        column.addLayout(row)
        column.addWidget(
            make_label(
                "The folder appears when the export is complete, with a card that lists its "
                "measurements. Each format gets its own subfolder.",
                "caption",
                wraps=True,
            )
        )

    @property
    def problem(self) -> str:
        """Reason why the wizard cannot continue; empty: it can, as far as is known."""
        return self._folder_problem or self._node_problem

    def node(self) -> str:
        """Return the chosen node; empty: the fastest. While estimates load, the previous choice."""
        if not self.nodes:
            return self._wanted
        return next((name for name, one in self.nodes.items() if one.isChecked()), "")

    def choose(self, node: str, folder: str) -> None:
        self._wanted = node
        self.folder.setText(folder)

    def look(self, answers: ExportAnswers) -> None:
        """Estimate the jobs on each node, and check their folders."""
        self._answers, self._node_problem = answers, ""
        self._clear()
        self._note.setText("Estimating time and memory on each node\u2026")
        run_id = self._run_id

        async def plan(core: CoreApi, report: Report) -> list[ExportPlan]:
            # Without a node, so that every node is estimated and not the chosen one alone.
            jobs = list_jobs(run_id, replace(answers, node="", calibration=""))
            return [await core.do(PlanExport(request=job.request)) for job in jobs]

        self._ask("nodes", self._context.bridge.run(plan, self._show_plans, self._fail))
        self.look_at_folder(answers)

    def look_at_folder(self, answers: ExportAnswers) -> None:
        """Check that the output folders do not exist yet."""
        answers = replace(answers, folder=self.folder.text())
        folders = [Path(job.folder) for job in list_jobs(self._run_id, answers)]
        self._ask(
            "folder",
            self._context.bridge.do(
                CheckExportFolders(folders=folders if answers.folder else []),
                lambda result: self._show_folder_problem(""),
                lambda error: self._show_folder_problem(describe_error(error)),
            ),
        )

    def leave(self) -> None:
        """Cancel all requests."""
        self._look_soon.stop()
        for op in self._ops.values():
            op.cancel()

    def show_places(self, rows: Sequence[PlaceRow]) -> None:
        """Show the nodes, with those that can run the export first."""
        self._clear()
        able = [row for row in rows if not row.problem]
        self._note.setText("Nodes that can run this export, fastest first." if able else NO_NODE)
        self._node_problem = "" if able else NO_NODE
        self._add("", "Fastest available node", "", is_able=bool(able))
        for row in rows:
            self._add(row.node, row.node, row.problem or row.words, is_able=not row.problem)
        chosen = self.nodes.get(self._wanted)
        # A chosen node that has become unable falls back to the fastest.
        (chosen if chosen is not None and chosen.isEnabled() else self.nodes[""]).setChecked(True)
        self.edited.emit()

    def _clear(self) -> None:
        """Remove all nodes; the chosen one is selected again if it returns."""
        # Estimates are reloaded when the formats change; keep the node that the user has chosen.
        self._wanted = self.node()
        while (item := self._rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                # Deletion is deferred, and until then old rows would show among the new ones.
                widget.hide()
                widget.deleteLater()
        self.nodes = {}

    def _show_plans(self, plans: list[ExportPlan]) -> None:
        self.show_places(join_places(plans))

    def _fail(self, error: RacklessError) -> None:
        self._node_problem = describe_error(error)
        self._note.setText("Time and memory are not known.")
        self.edited.emit()

    def _ask(self, what: str, op: Op) -> None:
        """Replace the previous request of the same kind."""
        if what in self._ops:
            self._ops[what].cancel()
        self._ops[what] = op

    def _type(self) -> None:
        # The old finding is about another folder; the check after the pause replaces it.
        self._folder_problem = ""
        self._look_soon.start()
        self.edited.emit()

    def _show_folder_problem(self, problem: str) -> None:
        self._folder_problem = problem
        self.edited.emit()

    def _add(self, node: str, title: str, words: str, *, is_able: bool) -> None:
        button = QRadioButton(title)
        button.setEnabled(is_able)
        button.setAccessibleDescription(words)
        button.toggled.connect(lambda checked: self.edited.emit() if checked else None)
        self._group.addButton(button)
        self._rows.addWidget(button)
        if words:
            label = make_label(words, "caption", wraps=True)
            label.setContentsMargins(TICK_INDENT_PX, 0, 0, 4)
            self._rows.addWidget(label)
        self.nodes[node] = button

    def _browse(self) -> None:
        # A save dialog, since the folder must not exist yet.
        chosen, _ = QFileDialog.getSaveFileName(self, "Output folder", self.folder.text())
        if chosen:
            self.folder.setText(chosen)
            self._type()

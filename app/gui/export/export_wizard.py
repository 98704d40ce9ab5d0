"""Export wizard, one step at a time; a running export continues without the window."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QDir, Qt, QTimer
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QDialog,
    QFrame,
    QHBoxLayout,
    QScrollArea,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from agents.contract.formats import EXPORTS
from app.artifacts.exports.request import ExportRequest
from app.conversation import Subject
from app.core.action import CoreApi
from app.core.artifacts import PlanExport
from app.core.runs import FindCheckpoints
from app.errors import RacklessError, describe_error
from app.events import CheckpointSnapshot, RunSnapshot
from app.flows.export import (
    NO_CHECKPOINT,
    STEPS,
    ExportAnswers,
    Step,
    describe_target,
    find_problems,
    group_targets,
    next_step,
    offer_targets,
    split_targets,
    suggest_folder,
)
from app.gui.chat.chat_dialog import open_chat
from app.gui.export.export_calibration import CalibrationPage
from app.gui.export.export_formats import FormatsPage
from app.gui.export.export_places import PlacesPage
from app.gui.export.export_progress import ProgressPage
from app.gui.export.export_summary import SummaryPage
from app.gui.kit.primitives import Button, make_label
from app.gui.kit.step_trail import StepTrail
from app.gui.session.bridge import Report
from app.gui.session.context import Context
from app.gui.session.export_board import Draft, ExportBatch
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.run_columns import checkpoint_columns
from app.gui.tables.view import TableView

if TYPE_CHECKING:
    from app.artifacts.estimates.plan import ExportPlan

TICK_MS = 1000
_TITLES: dict[Step, str] = {
    "what": "Choose a checkpoint",
    "formats": "Choose formats",
    "calibration": "Choose calibration data",
    "where": "Choose where to export",
    "summary": "Review",
}


class ExportWizard(QDialog):
    """Steps of an export; reopening it returns to the step where it was closed."""

    def __init__(self, context: Context, parent: QWidget, run: RunSnapshot) -> None:
        super().__init__(parent)
        self._context, self._run = context, run
        board = context.exports
        self.batch: ExportBatch | None = board.batches.get(run.run_id)
        usual = ExportAnswers(folder=suggest_folder(QDir.homePath(), run.name))
        draft = board.drafts.get(run.run_id)
        draft = draft or Draft(self.batch.answers if self.batch is not None else usual)
        self.step: Step = draft.step
        self._checkpoint_problem = ""
        self.setWindowTitle(f"Export {run.name}")
        self.resize(860, 640)
        self._make_pages(draft.answers)
        self._lay_out()
        self._tick = QTimer(self, interval=TICK_MS)
        self._tick.timeout.connect(self._count_time)
        self._ops = [
            context.bridge.do(
                FindCheckpoints(run_id=run.run_id),
                self._show_checkpoints,
                self._fail_checkpoints,
            ),
            context.bridge.run(
                lambda core, report: estimate_formats(core, report, run.run_id),
                progress=self._show_plan,
                failure=self._no_plan,
            ),
        ]
        self.finished.connect(lambda result: self._leave())
        if self.batch is not None:
            self._show_batch(self.batch)
        else:
            self.go_to(self.step)

    def answers(self) -> ExportAnswers:
        """Return the answers so far."""
        chosen = self.table.selected()
        # Selecting the newest means "the newest at the start of the export", so that a checkpoint
        # saved meanwhile is used.
        newest = max((row.step for row in self.model.rows()), default=None)
        step = chosen.step if chosen and chosen.step != newest else None
        return ExportAnswers(
            checkpoint=step,
            targets=self.formats.targets(),
            engine=self.formats.engine(),
            calibration=self.calibration.answer(),
            node=self.places.node(),
            folder=self.places.folder.text().strip(),
        )

    def go_to(self, step: Step) -> None:
        """Show a step, and prepare its page."""
        self.step = step
        self._title.setText(_TITLES[step])
        self.stack.setCurrentWidget(self._pages[step])
        self._steps.show_step(step)
        if step == "where":
            self.places.look(self.answers())
        if step == "summary":
            # Checked again, since the folder may have been created after the previous step.
            self.places.look_at_folder(self.answers())
            self.summary.show_answers(self.answers())
        self._review()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Ignore auto-repeat, so that a held Enter does not skip through steps."""
        if not (event.isAutoRepeat() and event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)):
            super().keyPressEvent(event)

    # ------------------------------------------------------------ layout

    def _make_pages(self, answers: ExportAnswers) -> None:
        context = self._context
        self.model: RowsModel[CheckpointSnapshot] = RowsModel(
            checkpoint_columns(context.cluster.now_s), key=lambda item: item.step
        )
        self.table = TableView(context.theme, self.model, "Checkpoints")
        self.table.sort_by("Step", Qt.SortOrder.DescendingOrder)
        self.table.chosen.connect(self._review)
        self._wanted_step = answers.checkpoint
        self.formats = FormatsPage()
        self.formats.choose(answers.targets, answers.engine)
        self.calibration = CalibrationPage(context)
        self.calibration.choose(answers.calibration)
        self.places = PlacesPage(context, self._run.run_id)
        self.places.choose(answers.node, answers.folder)
        for page in (self.formats, self.calibration, self.places):
            page.edited.connect(self._review)
        self.summary = SummaryPage(context.theme, self._run)
        self._pages: dict[Step, QWidget] = {
            "what": self.table,
            "formats": self.formats,
            "calibration": self.calibration,
            "where": self.places,
            "summary": self.summary,
        }
        self.stack = QStackedWidget()
        for part in self._pages.values():
            self.stack.addWidget(part)

    def _lay_out(self) -> None:
        theme = self._context.theme
        self._steps = StepTrail(STEPS)
        self._title = make_label(role="heading")
        self._problem = make_label(role="problem", wraps=True)
        self.back = Button(theme, "Back", lambda: self._move(-1))
        self.forward = Button(theme, "Next", lambda: self._move(1), role="primary")
        self.cancel = Button(theme, "Cancel export", self._cancel, icon="stop")
        self.again = Button(theme, "Another export", self._restart)
        self.forward.setDefault(True)
        self.close_ = Button(theme, "Close", self.accept)
        buttons = QHBoxLayout()
        buttons.setSpacing(8)
        buttons.addWidget(self.close_)
        buttons.addStretch(1)
        for button in (self.cancel, self.again, self.back, self.forward):
            buttons.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(self._steps)
        column.addWidget(self._title)
        column.addWidget(self.stack, 1)
        column.addWidget(self._problem)
        column.addLayout(buttons)

    # ------------------------------------------------------------ data

    def _show_checkpoints(self, found: tuple[CheckpointSnapshot, ...]) -> None:
        self.model.reset(found)
        usable = [one.step for one in found if one.verified is not False]
        self._checkpoint_problem = "" if usable else NO_CHECKPOINT
        newest = max(usable, default=0)
        self.table.select(self._wanted_step or newest)
        self._review()

    def _fail_checkpoints(self, error: RacklessError) -> None:
        self._checkpoint_problem = describe_error(error)
        self._review()

    def _show_plan(self, found: tuple[list[str], ExportPlan]) -> None:
        targets, plan = found
        self.formats.show_notes({target: describe_target(target, plan) for target in targets})

    def _no_plan(self, error: RacklessError) -> None:
        """Show no sizes without an estimate; the export itself reports what is wrong."""

    # ------------------------------------------------------------ navigation

    def _move(self, by: int) -> None:
        if by > 0 and self.step == "summary":
            self._start()
        else:
            self.go_to(next_step(self.step, self.answers(), by))

    def _start(self) -> None:
        context, asked = self._context, self.answers()
        batch = context.exports.begin(
            context.bridge, self._run.run_id, asked, context.cluster.now_s
        )
        self._show_batch(batch)

    def _show_batch(self, batch: ExportBatch) -> None:
        self.batch = batch
        page = ProgressPage(self._context.theme, batch)
        page.chat_wanted.connect(self._chat)
        scroll = QScrollArea()
        scroll.setWidget(page)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        self.stack.addWidget(scroll)
        self.stack.setCurrentWidget(scroll)
        self._title.setText("Exporting")
        batch.changed.connect(self._review)
        # Elapsed time is drawn by a timer, since a long phase may send no progress for minutes.
        self._tick.start()
        self._review()

    def _chat(self, folder: str) -> None:
        open_chat(self._context, self, self._run, Subject(what=folder))

    def _cancel(self) -> None:
        if self.batch is not None:
            self.batch.cancel()

    def _restart(self) -> None:
        """Return to the formats and keep the answers."""
        self._tick.stop()
        # Otherwise the wizard would show the finished batch when it is opened again.
        self._context.exports.batches.pop(self._run.run_id, None)
        self.batch = None
        self.go_to("formats")

    def _count_time(self) -> None:
        if self.batch is not None:
            self.batch.tick()

    def _review(self) -> None:
        batch = self.batch
        is_asking = batch is None
        self._steps.setVisible(is_asking)
        for button in (self.back, self.forward):
            button.setVisible(is_asking)
        self.cancel.setVisible(batch is not None and not batch.is_over)
        self.again.setVisible(batch is not None and batch.is_over)
        if batch is not None:
            self._problem.hide()
            if batch.is_over:
                self._tick.stop()
                self._title.setText("Export finished")
            return
        problem = find_problems(
            self.step,
            self.answers(),
            checkpoint_problem=self._checkpoint_problem,
            calibration_problem=self.calibration.problem,
            place_problem=self.places.problem,
        )
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))
        self.back.setEnabled(self.step != "what")
        self.forward.setEnabled(not problem)
        self.forward.setText("Export" if self.step == "summary" else "Next")

    def _leave(self) -> None:
        # A batch is not cancelled: the board owns it, and it continues without this window.
        self.places.leave()
        for op in self._ops:
            op.cancel()
        if self.batch is None:
            answers = self.answers()
            # Checkpoints have not arrived yet: keep the step of the restored draft.
            if not self.model.rows():
                answers = replace(answers, checkpoint=self._wanted_step)
            # The draft outlives the wizard, so reopening it continues here.
            self._context.exports.drafts[self._run.run_id] = Draft(answers, self.step)


async def estimate_formats(core: CoreApi, report: Report, run_id: str) -> None:
    """Estimate each format; the types of GGUF together, since only their sizes are shown."""
    for to in EXPORTS:
        for group in group_targets(to, [target for target, _ in offer_targets(to)]):
            request = ExportRequest(run_id=run_id, to=to, types=split_targets(group)[1])
            report((group, await core.do(PlanExport(request=request))))

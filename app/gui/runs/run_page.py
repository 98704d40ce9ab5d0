"""Page of one run: progress, charts, and tabs for ranks, events, logs, checkpoints and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QHBoxLayout, QSplitter, QTabWidget, QVBoxLayout, QWidget

from agents.contract.data import DataPreview
from app.core import runs
from app.core.action import Action, CoreApi
from app.events import (
    ACTIVE_STATES,
    CHECKPOINT_KINDS,
    INTERRUPTION_KINDS,
    CheckpointSnapshot,
    EvaluationRecord,
    RankProgress,
    RunEvent,
    RunSnapshot,
    StepRecord,
)
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import Button, make_label, make_scroll_area, set_page_margins
from app.gui.runs.data_tab import DataTab
from app.gui.runs.forecast_pane import ForecastPane
from app.gui.runs.log_pane import LogPane
from app.gui.runs.recovery_pane import RecoveryPane
from app.gui.runs.run_actions import RunActions
from app.gui.runs.run_charts import RunCharts
from app.gui.runs.run_head import RunHead, RunProgress
from app.gui.runs.run_notices import choose_notice, describe_verified
from app.gui.runs.stages_pane import StagesPane
from app.gui.runs.start_line import read_clock
from app.gui.session.banner_task import run_in_banner
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.run_columns import checkpoint_columns, event_columns, rank_columns
from app.gui.tables.view import TableView

WATCH_MS = 5000
"""Interval of the check for a stalled run, in milliseconds."""

MIN_SPLIT_PX = 280
"""Minimum height of charts and tables together, in pixels; a shorter page scrolls."""

T = TypeVar("T")
Loaded = tuple[list[StepRecord], list[RunEvent], DataPreview | None, list[EvaluationRecord]]


async def load_run(core: CoreApi, run_id: str) -> Loaded:
    """Return the steps, events, data preview and evaluations of a run."""
    return (
        await core.do(runs.ReadSteps(run_id=run_id)),
        await core.do(runs.ReadRunEvents(run_id=run_id)),
        await core.do(runs.ReadDataPreview(run_id=run_id)),
        await core.do(runs.ReadEvaluations(run_id=run_id)),
    )


def load_ranks(context: Context, run_id: str) -> list[Op]:
    """Ask for the ranks' last figures of a run that has ended: lists of runs lack them."""
    run = context.cluster.runs.get(run_id)
    if run is None or run.state in ACTIVE_STATES:
        return []
    return [
        context.bridge.do(
            runs.RefreshRun(run_id=run_id),
            context.cluster.take_run,
            failure=lambda error: None,  # deleted meanwhile: the page closes
        )
    ]


class RunPage(QWidget):
    closed = Signal()

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.run_id = ""
        self._last_step_s = context.cluster.now_s()
        # (attempt, step) of the newest step shown. Attempt comes first: a resume repeats step
        # numbers.
        self._newest: tuple[int, int] = (0, 0)
        # Live steps that arrived while the history was loading; None once it is loaded.
        self._early: list[StepRecord] | None = None
        self._ops: list[Op] = []
        self.notice = Banner(context.theme, can_close=False)
        self.banner = Banner(context.theme)
        self.run_actions = RunActions(context, self, self.banner)
        self.head = RunHead(context, self.run_actions)
        self.progress = RunProgress()
        self.charts = RunCharts(context.theme)
        now_s = context.cluster.now_s
        self.ranks: RowsModel[RankProgress] = RowsModel(rank_columns(now_s), key=lambda r: r.rank)
        self.events: RowsModel[RunEvent] = RowsModel(
            # Events have no id on the wire; time and text together identify one.
            event_columns(now_s),
            key=lambda e: (e.time_s, e.text),
        )
        self.checkpoints: RowsModel[CheckpointSnapshot] = RowsModel(
            checkpoint_columns(now_s), key=lambda c: c.step
        )
        self.forecast = ForecastPane(context)
        self.stages = StagesPane(context.theme)
        self.forecast.loaded.connect(self.stages.show_forecast)
        self.recovery = RecoveryPane(context)
        self.recovery.summarized.connect(self.progress.show_interruptions)
        self.logs = LogPane(context)
        self.data = DataTab(context.theme)
        self.tabs = self._make_tabs()
        body = QWidget()
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(make_scroll_area(body))
        column = QVBoxLayout(body)
        set_page_margins(column, body)
        column.setSpacing(12)
        for widget in (self.head, self.notice, self.banner, self.progress):
            column.addWidget(widget)
        column.addWidget(_make_split(self.charts, self.tabs), 1)
        self._connect()

    def open_run(self, run_id: str) -> None:
        """Show another run; its history is read from the core."""
        if run_id == self.run_id:
            return
        # Answers for the previous run would otherwise fill this page.
        for op in self._ops:
            op.cancel()
        self._ops.clear()
        self.run_id = run_id
        self.banner.hide()
        self.charts.clear()
        self._newest = (0, 0)
        self._early = []
        # A stall is timed from here on: the previous run's last step must not count.
        self._last_step_s = self._context.cluster.now_s()
        for model in (self.ranks, self.events, self.checkpoints):
            model.reset([])
        self.data.show_data(None)
        self.forecast.open_run(run_id)
        self.recovery.open_run(run_id)
        self._show_run(run_id)
        self.refresh()

    def refresh(self) -> None:
        """Reload steps and events, and ask the nodes for checkpoints."""
        run_id = self.run_id
        bridge = self._context.bridge
        self._ops = [
            bridge.run(lambda core, report: load_run(core, run_id), self._fill),
            *load_ranks(self._context, run_id),
            self._load(runs.FindCheckpoints(run_id=self.run_id), self._show_checkpoints),
        ]

    # ------------------------------------------------------------ layout

    def _make_tabs(self) -> QTabWidget:
        theme = self._context.theme
        tabs = QTabWidget()
        tabs.setDocumentMode(True)
        ranks = TableView(theme, self.ranks, "Ranks")
        ranks.sort_by("Rank", Qt.SortOrder.AscendingOrder)
        events = TableView(theme, self.events, "Events")
        events.sort_by("Time", Qt.SortOrder.DescendingOrder)
        saved = TableView(theme, self.checkpoints, "Checkpoints")
        saved.sort_by("Step", Qt.SortOrder.DescendingOrder)
        self.saved = saved
        talk = Button(
            theme,
            "Chat",
            self._chat,
            icon="chat",
            role="link",
            tip="Chat with the selected checkpoint, or with the newest",
        )
        verify = Button(
            theme,
            "Verify all",
            self._verify,
            icon="check",
            role="link",
            tip="Hash every file of every copy on its node and compare",
        )
        for title, part in (
            ("Ranks", _padded(ranks)),
            ("Events", _padded(events)),
            ("Log", self.logs),
            ("Checkpoints", _padded(saved, talk, verify)),
            ("Data", self.data),
            ("Forecast", self.forecast),
            ("Recovery", self.recovery),
            ("Stages", self.stages),
        ):
            tabs.addTab(part, title)
        tabs.setTabVisible(tabs.indexOf(self.stages), False)
        self.stages.has_stages.connect(partial(tabs.setTabVisible, tabs.indexOf(self.stages)))
        return tabs

    def _connect(self) -> None:
        cluster = self._context.cluster
        cluster.run_changed.connect(self._show_run)
        cluster.run_deleted.connect(self._leave)
        cluster.steps_arrived.connect(self._take_steps)
        cluster.run_event_arrived.connect(self._take_event)
        self.head.back.connect(self.closed)
        # A stalled run sends nothing, so only a timer can notice it.
        self._watch = QTimer(self, interval=WATCH_MS)
        self._watch.timeout.connect(self._look_over)
        self._watch.timeout.connect(self.forecast.refresh)
        self._watch.start()

    # ------------------------------------------------------------ live data

    def _show_run(self, run_id: str) -> None:
        run = self._context.cluster.runs.get(run_id)
        if run is None or run_id != self.run_id:
            return
        self._show_figures()
        self.forecast.show_attempt(run.attempt)
        self.logs.show_run(run_id, run.attempt, [(rank.rank, rank.node) for rank in run.ranks])
        # Every change of the run may raise or clear a notice, so the banner is computed, never
        # toggled.
        self._look_over()

    def _show_figures(self) -> None:
        shown = self._context.cluster.current_run(self.run_id)
        if shown is not None:
            self.head.show_run(shown)
            self.progress.show_run(shown, partial(read_clock, self._context.cluster, shown))
            self.ranks.reset(shown.ranks)
            self.stages.show_ranks(shown.ranks)

    def _look_over(self) -> None:
        run = self._context.cluster.current_run(self.run_id)
        if run is None:
            return
        # A node falls silent without an event.
        if self._context.cluster.has_silent_nodes(run):
            self._show_figures()
        age_s = self._context.cluster.now_s() - self._last_step_s
        self.notice.show_notice(choose_notice(run, age_s))

    def _fill(self, found: Loaded) -> None:
        steps, events, data, evaluations = found
        self.data.show_data(data)
        # Live steps held back during loading come after the history, which may already contain
        # them.
        early, self._early = self._early or [], None
        self._take_steps(self.run_id, [*steps, *early])
        self.charts.show_evaluations(evaluations)
        self.events.reset(events)

    def _take_steps(self, run_id: str, steps: Sequence[StepRecord]) -> None:
        """Append steps newer than the newest shown; history and live steps may overlap."""
        if run_id != self.run_id:
            return
        if self._early is not None:
            self._early += steps
            return
        fresh: list[StepRecord] = []
        for item in steps:
            if (item.attempt, item.step) > self._newest:
                self._newest = (item.attempt, item.step)
                fresh.append(item)
        self.charts.extend(fresh)
        if fresh:
            self._last_step_s = self._context.cluster.now_s()

    def _take_event(self, event: RunEvent) -> None:
        if event.run_id != self.run_id:
            return
        self.events.put(event)
        # The first rank writes the preview before it reports its start, so the data is complete
        # now.
        if event.kind == "started":
            self._load(runs.ReadDataPreview(run_id=self.run_id), self._show_data)
        if event.kind == "evaluated":
            self._load(runs.ReadEvaluations(run_id=self.run_id), self._show_evaluations)
        if event.kind in INTERRUPTION_KINDS:
            self.recovery.refresh()
        if event.kind in CHECKPOINT_KINDS:
            self._load(runs.FindCheckpoints(run_id=self.run_id), self._show_checkpoints)

    def _load(self, read: Action[T], show: Callable[[str, T], None]) -> Op:
        """Read data of the run; on an error, the page keeps its content."""
        show_here = partial(show, self.run_id)
        return self._context.bridge.do(read, show_here, failure=lambda error: None)

    # Answers of nodes may arrive after the page has moved on to another run.

    def _show_checkpoints(self, run_id: str, found: tuple[CheckpointSnapshot, ...]) -> None:
        if run_id == self.run_id:
            self.checkpoints.reset(found)

    def _show_data(self, run_id: str, found: DataPreview | None) -> None:
        if run_id == self.run_id:
            self.data.show_data(found)

    def _show_evaluations(self, run_id: str, found: Sequence[EvaluationRecord]) -> None:
        if run_id == self.run_id:
            self.charts.show_evaluations(found)

    def _chat(self) -> None:
        run, chosen = self._context.cluster.runs.get(self.run_id), self.saved.selected()
        if run is not None:
            self.run_actions.chat(run, chosen.step if chosen else None)

    def _verify(self) -> None:
        run = self._context.cluster.runs.get(self.run_id)
        if run is None:
            return
        run_id = run.run_id
        run_in_banner(
            self._context.bridge,
            self.banner,
            runs.FindCheckpoints(run_id=run_id, verify=True),
            partial(self._show_verified, run),
            title=f"Verifying checkpoints of {run.name}",
            hint="Reading every copy in full.",
            cancelled="The previous result still applies.",
        )

    def _show_verified(self, run: RunSnapshot, found: tuple[CheckpointSnapshot, ...]) -> None:
        self._show_checkpoints(run.run_id, found)
        self.banner.show_message(*describe_verified(run.name, found))

    def _leave(self, run_id: str) -> None:
        if run_id == self.run_id:
            # Answers still under way must not fill the page of a deleted run.
            self.run_id = ""
            self.closed.emit()


def _make_split(upper: QWidget, lower: QWidget) -> QSplitter:
    split = QSplitter(Qt.Orientation.Vertical)
    split.addWidget(upper)
    split.addWidget(lower)
    split.setSizes([240, 300])
    split.setMinimumHeight(MIN_SPLIT_PX)
    split.setStretchFactor(0, 1)
    split.setStretchFactor(1, 1)
    split.setChildrenCollapsible(False)
    split.setHandleWidth(12)
    return split


def _padded(part: QWidget, *buttons: QWidget) -> QWidget:
    box = QWidget()
    column = QVBoxLayout(box)
    column.setContentsMargins(0, 12, 0, 0)
    column.setSpacing(8)
    if buttons:
        row = QHBoxLayout()
        row.addWidget(make_label("Newest first. You can resume from any of them.", "muted"), 1)
        for button in buttons:
            row.addWidget(button)
        column.addLayout(row)
    column.addWidget(part, 1)
    return box

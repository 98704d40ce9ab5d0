"""Compare several runs: their curves in shared charts, their results, and settings that differ."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QSplitter, QVBoxLayout, QWidget

from app.core.action import CoreApi
from app.core.runs import ReadSteps
from app.events import RunSnapshot, StepRecord
from app.flows.compare import CompareRow, list_differences, list_results
from app.gui.charts.line import LineSeries, choose_style
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import IconButton, make_label, set_page_margins
from app.gui.runs.run_charts import LOSS, OTHERS, ChosenPlots, add_points
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView

QUANTITIES = (LOSS, *OTHERS)


class ComparePage(QWidget):
    closed = Signal()

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._runs: list[RunSnapshot] = []
        self._steps: dict[str, list[StepRecord]] = {}
        self._op: Op | None = None
        self.banner = Banner(context.theme)
        self.title = make_label("", "title")
        self.charts = [self._make_charts(0), self._make_charts(1)]
        self.model: RowsModel[CompareRow] = RowsModel([], key=lambda row: row.label)
        self._tables = QVBoxLayout()
        column = QVBoxLayout(self)
        set_page_margins(column, self)
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addWidget(
            IconButton(context.theme, "back", "Back to all runs (Esc)", self.closed.emit)
        )
        head.addWidget(self.title)
        head.addStretch(1)
        column.addLayout(head)
        column.addWidget(self.banner)
        column.addWidget(self._make_split(), 1)
        context.cluster.steps_arrived.connect(self._take_steps)
        context.cluster.run_changed.connect(self._change_run)

    def open_runs(self, runs: Sequence[RunSnapshot]) -> None:
        """Compare `runs`; steps logged before now are read from the core."""
        if self._op is not None:
            self._op.cancel()
        self._runs, self._steps = list(runs), {}
        self.banner.hide()
        self.title.setText(f"Comparing {len(runs)} runs")
        self._show_tables()
        self._draw_all()
        ids = [run.run_id for run in runs]
        self._op = self._context.bridge.run(
            lambda core, report: _read(core, ids), self._fill, self.banner.show_error
        )

    # ------------------------------------------------------------ layout

    def _make_charts(self, place: int) -> ChosenPlots:
        charts = ChosenPlots(self._context.theme, QUANTITIES, "Metric shown in this chart")
        for plot in charts.plots:
            # attempts start at different steps in each run, so shared marks would be wrong
            plot.shows_marks = False
        charts.choice.setCurrentIndex(place)
        charts.chosen.connect(lambda: self._draw(charts))
        return charts

    def _make_split(self) -> QSplitter:
        charts = QWidget()
        row = QHBoxLayout(charts)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(16)
        for chosen in self.charts:
            row.addWidget(chosen, 1)
        below = QWidget()
        self._tables = QVBoxLayout(below)
        self._tables.setContentsMargins(0, 4, 0, 0)
        self._tables.setSpacing(8)
        split = QSplitter(Qt.Orientation.Vertical)
        split.addWidget(charts)
        split.addWidget(below)
        split.setSizes([300, 320])
        split.setChildrenCollapsible(False)
        split.setHandleWidth(12)
        return split

    def _show_tables(self) -> None:
        while (item := self._tables.takeAt(0)) is not None:
            if (old := item.widget()) is not None:
                old.hide()
                old.deleteLater()
        differing = list_differences(self._runs)
        # Columns are runs, so other runs need another model.
        model: RowsModel[CompareRow] = RowsModel(_columns(self._runs), key=lambda row: row.label)
        for row in (*list_results(self._runs), *differing):
            model.put(row)
        self.model = model
        note = "Results, and the settings that differ."
        if not differing:
            note = "Results. All settings are the same."
        self._tables.addWidget(make_label(note, "muted"))
        name = "Results and settings that differ"
        self._tables.addWidget(TableView(self._context.theme, model, name), 1)

    # ------------------------------------------------------------ figures

    def _fill(self, found: dict[str, list[StepRecord]]) -> None:
        for run_id, steps in found.items():
            newer = self._steps.get(run_id, [])
            # Steps that arrived live while the history was read come after it; overlap is dropped.
            last = (steps[-1].attempt, steps[-1].step) if steps else (0, 0)
            self._steps[run_id] = [
                *steps,
                *(one for one in newer if (one.attempt, one.step) > last),
            ]
        self._draw_all()

    def _take_steps(self, run_id: str, steps: Sequence[StepRecord]) -> None:
        ids = [run.run_id for run in self._runs]
        # A hidden page is loaded again by `open_runs`, so live steps need not be collected.
        if run_id not in ids or not self.isVisible():
            return
        self._steps.setdefault(run_id, []).extend(steps)
        for charts in self.charts:
            line = charts.plot.lines[ids.index(run_id)]
            add_points(line.curves, charts.quantity.reads[0][1], steps)
            charts.plot.update()

    def _change_run(self, run_id: str) -> None:
        for place, run in enumerate(self._runs):
            if run.run_id == run_id:
                self._runs[place] = self._context.cluster.runs[run_id]
                for row in list_results(self._runs):
                    self.model.put(row)

    def _draw_all(self) -> None:
        newest = [steps[-1] for steps in self._steps.values() if steps]
        reported = {name for step in newest for name in step.metrics}
        for charts in self.charts:
            charts.offer_metrics(reported)
            self._draw(charts)

    def _draw(self, charts: ChosenPlots) -> None:
        """Draw all runs in the visible plot; `_take_steps` appends newer steps to it."""
        # Redrawing resets the view; keep the zoom that the user has chosen.
        view, lines = charts.plot.zoomed_to, []
        for place, run in enumerate(self._runs):
            line = LineSeries(run.name, *choose_style(place))
            add_points(line.curves, charts.quantity.reads[0][1], self._steps.get(run.run_id, []))
            lines.append(line)
        if lines:
            charts.plot.show_lines(lines)
            charts.plot.show_range(view)


async def _read(core: CoreApi, ids: Sequence[str]) -> dict[str, list[StepRecord]]:
    return {run_id: await core.do(ReadSteps(run_id=run_id)) for run_id in ids}


def _columns(runs: Sequence[RunSnapshot]) -> list[Column[CompareRow]]:
    def value(place: int) -> Column[CompareRow]:
        return Column(
            title=runs[place].name, text=lambda row: row.values[place], stretches=True, width_px=160
        )

    return [
        Column(title="Setting", text=lambda row: row.label, width_px=220),
        *map(value, range(len(runs))),
    ]

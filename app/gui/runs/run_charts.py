"""Charts of one run: the loss on the left, a metric of the user's choice on the right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QListView,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from agents.contract.objectives import METRICS
from app.events import EvaluationRecord, StepRecord
from app.gui.charts.curves import Curves
from app.gui.charts.line import LineSeries, choose_style
from app.gui.charts.plot import Plot
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import make_panel, set_style_property
from app.gui.kit.theme import Theme
from app.text import DASH, show_exponent, show_loss, show_number, show_rate, show_share

Read = Callable[[StepRecord], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """Metric that a plot can show."""

    key: str
    title: str
    write: Callable[[float | None], str]
    reads: tuple[tuple[str, Read], ...]
    """Name of each line and the function that reads its value from a step."""
    color: str = "chart_utilisation"
    from_zero: bool = True


def _read_metric(name: str) -> Read:
    return lambda step: step.metrics.get(name)


LOSS = Quantity(
    key="loss",
    title="Loss",
    write=show_loss,
    reads=(("loss", lambda step: step.loss),),
    from_zero=False,
)
OTHERS = (
    Quantity(
        key="speed",
        title="Throughput, tokens/s",
        write=show_rate,
        reads=(("tokens/s", lambda step: step.tokens_per_s),),
        color="chart_tokens",
    ),
    Quantity(
        key="step",
        title="Seconds per step",
        write=lambda value: DASH if value is None else f"{show_number(value, 2)} s",
        reads=(
            ("step", lambda step: step.step_s),
            ("waiting for others", lambda step: step.wait_s),
        ),
    ),
    Quantity(
        key="efficiency",
        title="Efficiency",
        write=show_share,
        reads=(("efficiency", lambda step: step.eta),),
        color="chart_memory",
    ),
    Quantity(
        key="norm",
        title="Gradient norm",
        write=lambda value: show_number(value, 3),
        reads=(("gradient norm", lambda step: step.gradient_norm),),
        color="chart_temperature",
    ),
    Quantity(
        key="rate",
        title="Learning rate",
        write=show_exponent,
        reads=(("learning rate", lambda step: step.learning_rate),),
        color="chart_memory",
    ),
    *(
        Quantity(
            key=metric.name,
            title=metric.label,
            write=lambda value: show_number(value, 3),
            reads=((metric.label.lower(), _read_metric(metric.name)),),
            from_zero=False,
        )
        for metric in METRICS.values()
    ),
)


def make_plot(theme: Theme, quantity: Quantity, *, title: str | None = None) -> Plot:
    """Return an empty plot for `quantity`, with one line for each of its values."""
    shown = quantity.title if title is None else title
    plot = Plot(theme, shown, quantity.color, quantity.write)
    plot.lines[0].name = quantity.title
    if quantity.from_zero:
        plot.start_at_zero()
    if len(quantity.reads) > 1:
        looks = [choose_style(place) for place in range(len(quantity.reads))]
        plot.show_lines(
            [LineSeries(name, *look) for (name, _), look in zip(quantity.reads, looks, strict=True)]
        )
    plot.setAccessibleName(quantity.title)
    return plot


def add_points(curves: Curves, read: Read, steps: Sequence[StepRecord]) -> None:
    """Append `read(step)` of each step; `steps` may span several attempts, in order."""
    for attempt, part in group_attempts(steps):
        at = [float(one.step) for one in part]
        curves.extend(attempt, at, [nan_if_unknown(read(one)) for one in part])


def group_attempts(steps: Sequence[StepRecord]) -> Iterator[tuple[int, list[StepRecord]]]:
    """Yield each attempt with its steps, the oldest first."""
    # Attempts restart at an earlier step, so their points must not be joined by a line.
    for attempt in sorted({one.attempt for one in steps}):
        yield attempt, [one for one in steps if one.attempt == attempt]


class ChosenPlots(QWidget):
    """Panel with one plot per metric; a combo box chooses which one is visible."""

    chosen = Signal()
    """Another plot has become visible."""

    def __init__(self, theme: Theme, quantities: Sequence[Quantity], name: str) -> None:
        super().__init__()
        self.quantities = tuple(quantities)
        self.plots = [make_plot(theme, one, title="") for one in quantities]
        self.choice = ChoiceBox()
        self.choice.setAccessibleName(name)
        self.choice.setSizeAdjustPolicy(ChoiceBox.SizeAdjustPolicy.AdjustToContents)
        set_style_property(self.choice, "quiet", True)
        stack = QStackedWidget()
        for one, plot in zip(quantities, self.plots, strict=True):
            self.choice.addItem(one.title, one.key)
            stack.addWidget(plot)
        self.choice.currentIndexChanged.connect(stack.setCurrentIndex)
        self.choice.currentIndexChanged.connect(lambda place: self.chosen.emit())
        panel, box = make_chart_panel(stack)
        box.addWidget(self.choice, 0, 0, Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(panel)
        self.offer_metrics(())

    def offer_metrics(self, names: Collection[str]) -> None:
        """Offer, of the metrics that only some objectives report, those with these names."""
        view, model = self.choice.view(), self.choice.model()
        assert isinstance(view, QListView)
        for place, one in enumerate(self.quantities):
            is_hidden = one.key in METRICS and one.key not in names
            view.setRowHidden(place, is_hidden)
            # The keyboard passes over a choice that is disabled.
            flags = Qt.ItemFlag.NoItemFlags.value if is_hidden else None
            model.setData(model.index(place, 0), flags, Qt.ItemDataRole.UserRole - 1)
            if is_hidden and place == self.choice.currentIndex():
                self.choice.setCurrentIndex(0)

    @property
    def plot(self) -> Plot:
        """Visible plot."""
        return self.plots[self.choice.currentIndex()]

    @property
    def quantity(self) -> Quantity:
        """Metric of the visible plot."""
        return self.quantities[self.choice.currentIndex()]


def make_chart_panel(content: QWidget) -> tuple[QFrame, QGridLayout]:
    """Return an empty chart panel and its layout."""
    panel = make_panel()
    box = QGridLayout(panel)
    box.setContentsMargins(1, 1, 1, 1)
    box.addWidget(content, 0, 0)
    return panel, box


class RunCharts(QWidget):
    """Two chart panels whose zoom stays in sync."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.loss = make_plot(theme, LOSS)
        self.right = ChosenPlots(theme, OTHERS, "Metric shown in the right chart")
        self.choice = self.right.choice
        self.others = {one.key: plot for one, plot in zip(OTHERS, self.right.plots, strict=True)}
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(16)
        row.addWidget(make_chart_panel(self.loss)[0], 1)
        row.addWidget(self.right, 1)
        for plot in self.plots:
            plot.view_changed.connect(self._follow)

    @property
    def plots(self) -> list[Plot]:
        """All plots, including hidden ones."""
        return [self.loss, *self.others.values()]

    def clear(self) -> None:
        self.right.offer_metrics(())
        for plot in self.plots:
            plot.clear()

    def extend(self, steps: Sequence[StepRecord]) -> None:
        """Append steps, in order."""
        if steps:
            self.right.offer_metrics(steps[-1].metrics)
        for attempt, part in group_attempts(steps):
            at = [float(one.step) for one in part]
            for quantity, plot in zip((LOSS, *OTHERS), self.plots, strict=True):
                for line, (_, read) in enumerate(quantity.reads):
                    plot.extend(attempt, at, [nan_if_unknown(read(one)) for one in part], line=line)

    def show_evaluations(self, found: Sequence[EvaluationRecord]) -> None:
        """Show evaluation loss in the chart of training loss; without any, its line is hidden."""
        training = self.loss.lines[0]
        if not found:
            self.loss.show_lines([training])
            return
        line = LineSeries("evaluation", "chart_temperature", Qt.PenStyle.DashLine)
        for one in found:
            # One attempt for all evaluations: a resume must not cut the dashed line.
            line.curves.extend(1, [float(one.step)], [nan_if_unknown(one.loss)])
        training.name = "training"
        # Replacing the lines resets the view; keep the zoom that the user has chosen.
        view = self.loss.zoomed_to
        self.loss.show_lines([training, line])
        self.loss.show_range(view)

    def _follow(self, view: object) -> None:
        # This does not loop: a plot signals a range only if it differs from its own.
        for plot in self.plots:
            plot.show_range(view)  # type: ignore[arg-type]


def nan_if_unknown(value: float | None) -> float:
    """Return `value` as plots expect it: NaN leaves a gap."""
    return math.nan if value is None else value

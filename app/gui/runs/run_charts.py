"""The curves of one run: its loss, and beside it one of several other quantities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.events import EvaluationRecord, StepRecord
from app.gui.charts.curves import Curves
from app.gui.charts.line import LineSeries, choose_style
from app.gui.charts.plot import Plot
from app.gui.kit.primitives import make_panel, set_style_property
from app.gui.kit.theme import Theme
from app.text import DASH, show_exponent, show_loss, show_number, show_rate, show_share

Read = Callable[[StepRecord], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """What a plot can show of a run."""

    key: str
    title: str
    write: Callable[[float | None], str]
    reads: tuple[tuple[str, Read], ...]
    """Name and value of each line."""
    color: str = "chart_utilisation"
    from_zero: bool = True


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
)


def make_plot(theme: Theme, quantity: Quantity, *, title: str | None = None) -> Plot:
    """Return an empty plot of a quantity, one line for each of its values."""
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
    """Add what `read` says of steps, which are of one attempt or of several in order."""
    for attempt, part in group_attempts(steps):
        at = [float(one.step) for one in part]
        curves.extend(attempt, at, [nan_if_unknown(read(one)) for one in part])


def group_attempts(steps: Sequence[StepRecord]) -> Iterator[tuple[int, list[StepRecord]]]:
    """Yield each attempt with its steps, the oldest first."""
    for attempt in sorted({one.attempt for one in steps}):
        yield attempt, [one for one in steps if one.attempt == attempt]


class ChosenPlots(QWidget):
    """A panel with one plot for each quantity, of which the one that is chosen above is seen."""

    chosen = Signal()
    """Another one is seen."""

    def __init__(self, theme: Theme, quantities: Sequence[Quantity], name: str) -> None:
        super().__init__()
        self.quantities = tuple(quantities)
        self.plots = [make_plot(theme, one, title="") for one in quantities]
        self.choice = QComboBox()
        self.choice.setAccessibleName(name)
        self.choice.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
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

    @property
    def plot(self) -> Plot:
        """The one that is seen."""
        return self.plots[self.choice.currentIndex()]

    @property
    def quantity(self) -> Quantity:
        """What it shows."""
        return self.quantities[self.choice.currentIndex()]


def make_chart_panel(content: QWidget) -> tuple[QFrame, QGridLayout]:
    """Return a panel around a chart, and its layout."""
    panel = make_panel()
    box = QGridLayout(panel)
    box.setContentsMargins(1, 1, 1, 1)
    box.addWidget(content, 0, 0)
    return panel, box


class RunCharts(QWidget):
    """Two panels; what is in view of one is in view of the other."""

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
        """All of them, also those out of sight."""
        return [self.loss, *self.others.values()]

    def clear(self) -> None:
        for plot in self.plots:
            plot.clear()

    def extend(self, steps: Sequence[StepRecord]) -> None:
        """Add steps, in order."""
        for attempt, part in group_attempts(steps):
            at = [float(one.step) for one in part]
            for quantity, plot in zip((LOSS, *OTHERS), self.plots, strict=True):
                for line, (_, read) in enumerate(quantity.reads):
                    plot.extend(attempt, at, [nan_if_unknown(read(one)) for one in part], line=line)

    def show_evaluations(self, found: Sequence[EvaluationRecord]) -> None:
        """Show the loss of evaluations beside that of training; none: one line is enough."""
        training = self.loss.lines[0]
        if not found:
            self.loss.show_lines([training])
            return
        line = LineSeries("evaluation", "chart_temperature", Qt.PenStyle.DashLine)
        for one in found:
            line.curves.extend(1, [float(one.step)], [nan_if_unknown(one.loss)])
        training.name = "training"
        view = self.loss.zoomed_to
        self.loss.show_lines([training, line])
        self.loss.show_range(view)

    def _follow(self, view: object) -> None:
        for plot in self.plots:
            plot.show_range(view)  # type: ignore[arg-type]


def nan_if_unknown(value: float | None) -> float:
    """Return the value as plots take it."""
    return math.nan if value is None else value

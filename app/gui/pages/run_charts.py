"""The curves of one run: its loss, and beside it one of several other quantities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QGridLayout, QHBoxLayout, QStackedWidget, QWidget

from app.events import EvaluationRecord, StepRecord
from app.gui.charts.line import Line, choose_look
from app.gui.charts.plot import Plot
from app.gui.theme import Theme
from app.gui.widgets.parts import make_panel, set_role
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
        looks = [choose_look(place) for place in range(len(quantity.reads))]
        plot.show_lines(
            [Line(name, *look) for (name, _), look in zip(quantity.reads, looks, strict=True)]
        )
    plot.setAccessibleName(quantity.title)
    return plot


def extend(plot: Plot, quantity: Quantity, attempt: int, steps: Sequence[StepRecord]) -> None:
    """Add steps of an attempt to a plot of the quantity."""
    at = [float(item.step) for item in steps]
    for place, (_, read) in enumerate(quantity.reads):
        plot.extend(attempt, at, [nan_if_unknown(read(item)) for item in steps], line=place)


class RunCharts(QWidget):
    """Two panels; what is in view of one is in view of the other."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.loss = make_plot(theme, LOSS)
        self.others = {one.key: make_plot(theme, one, title="") for one in OTHERS}
        self.choice = QComboBox()
        self.choice.setAccessibleName("Quantity in the chart on the right")
        self.choice.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
        set_role(self.choice, "quiet", True)
        for one in OTHERS:
            self.choice.addItem(one.title, one.key)
        self._stack = QStackedWidget()
        for plot in self.others.values():
            self._stack.addWidget(plot)
        self.choice.currentIndexChanged.connect(self._stack.setCurrentIndex)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(16)
        for content, over in ((self.loss, None), (self._stack, self.choice)):
            panel = make_panel()
            box = QGridLayout(panel)
            box.setContentsMargins(1, 1, 1, 1)
            box.addWidget(content, 0, 0)
            if over is not None:
                box.addWidget(over, 0, 0, Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft)
            row.addWidget(panel, 1)
        for plot in self.plots:
            plot.viewed.connect(self._follow)

    @property
    def plots(self) -> list[Plot]:
        """All of them, also those out of sight."""
        return [self.loss, *self.others.values()]

    def clear(self) -> None:
        for plot in self.plots:
            plot.clear()

    def extend(self, attempt: int, steps: Sequence[StepRecord]) -> None:
        """Add steps of an attempt."""
        extend(self.loss, LOSS, attempt, steps)
        for one in OTHERS:
            extend(self.others[one.key], one, attempt, steps)

    def show_evaluations(self, found: Sequence[EvaluationRecord]) -> None:
        """Show the loss of evaluations beside that of training; none: one line is enough."""
        training = self.loss.lines[0]
        if not found:
            self.loss.show_lines([training])
            return
        line = Line("evaluation", "chart_temperature", Qt.PenStyle.DashLine)
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

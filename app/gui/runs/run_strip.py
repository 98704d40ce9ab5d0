"""Active runs, one line each, above the live wall."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QVBoxLayout, QWidget

from app.events import RunSnapshot
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, ElidedLabel, make_label
from app.gui.kit.status import StatusPill
from app.gui.session.context import Context
from app.telemetry.state import describe_run
from app.text import DASH, show_duration, show_loss, show_rate

PROGRESS_STEPS = 10_000
"""Steps of a progress bar, which counts whole numbers; enough for it to move smoothly."""
MAX_LINES = 4


class RunLine(QFrame):
    """One active run: name, state, progress, loss, speed and time left."""

    opened = Signal()

    def __init__(self, context: Context, run: RunSnapshot) -> None:
        super().__init__()
        self.setObjectName("panel")
        self._context = context
        self._name = ElidedLabel(role="subheading")
        # A long name must not push the figures out of the line.
        self._name.setMinimumWidth(120)
        self._state = StatusPill(context.theme, describe_run(run.state, run.phase))
        self._bar = QProgressBar()
        self._bar.setRange(0, PROGRESS_STEPS)
        self._bar.setTextVisible(False)
        self._bar.setMinimumWidth(120)
        self._figures = {name: make_label() for name in ("step", "loss", "speed", "left")}
        button = Button(context.theme, "Open", self.opened.emit, role="link")
        button.setAccessibleName(f"Open run {run.name}")
        lead = QWidget()
        first = QHBoxLayout(lead)
        first.setContentsMargins(0, 0, 0, 0)
        first.setSpacing(16)
        first.addWidget(self._name, 2)
        first.addWidget(self._state)
        first.addWidget(self._bar, 3)
        row = FlowLayout(lead=lead, gap_px=16, line_gap_px=2)
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 8, 8, 8)
        column.addLayout(row)
        for name, caption in (("step", "Step"), ("loss", "Loss"), ("speed", ""), ("left", "left")):
            row.addWidget(_with_caption(self._figures[name], caption))
        row.addWidget(button)
        self.show_run(run)

    def show_run(self, run: RunSnapshot) -> None:
        self._name.setText(run.name)
        silent = bool(run.silent_nodes)
        self._state.show_status(describe_run(run.state, run.phase, is_silent=silent))
        share = (run.step or 0) / run.total_steps if run.total_steps else 0.0
        # QProgressBar counts in integers; PROGRESS_STEPS makes it move smoothly.
        self._bar.setValue(round(share * PROGRESS_STEPS))
        self._bar.setAccessibleName(f"Progress of {run.name}")
        total = f" / {run.total_steps:,}" if run.total_steps else ""
        self._figures["step"].setText(DASH if run.step is None else f"{run.step:,}{total}")
        self._figures["loss"].setText(show_loss(run.loss))
        self._figures["speed"].setText(show_rate(run.tokens_per_s))
        self._figures["left"].setText(show_time_left(run.remaining_s))


def show_time_left(seconds: float | None) -> str:
    """Return the time left; below a second it says "moments", since milliseconds would mislead."""
    return "moments" if seconds is not None and seconds < 1 else show_duration(seconds)


def _with_caption(figure: QLabel, caption: str) -> QWidget:
    box = QWidget()
    row = QHBoxLayout(box)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(6)
    label = make_label(caption, "muted")
    for widget in (figure, label) if caption == "left" else (label, figure):
        if widget is figure or caption:
            row.addWidget(widget)
    return box


class RunStrip(QWidget):
    """Lines of the active runs; hidden without any."""

    run_opened = Signal(str)
    all_opened = Signal()

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._lines: dict[str, RunLine] = {}
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(8)
        self._more = Button(context.theme, "", self.all_opened.emit, role="link")
        self._column.addWidget(self._more)
        context.cluster.run_changed.connect(self.refresh)
        context.cluster.run_deleted.connect(self.refresh)
        self.refresh()

    def refresh(self, run_id: str = "") -> None:
        """Show the runs that are currently active."""
        cluster = self._context.cluster
        active = [cluster.current_run(run.run_id) or run for run in cluster.active_runs()]
        shown = {run.run_id: run for run in active[:MAX_LINES]}
        for gone in [key for key in self._lines if key not in shown]:
            line = self._lines.pop(gone)
            line.hide()
            line.deleteLater()
        for key, run in shown.items():
            # Lines are reused, since replacing a focused button would drop the keyboard focus.
            if key in self._lines:
                self._lines[key].show_run(run)
            else:
                self._add(run)
        rest = len(active) - len(shown)
        self._more.setVisible(rest > 0)
        self._more.setText(f"{rest} more active")
        self.setVisible(bool(shown))

    def _add(self, run: RunSnapshot) -> None:
        line = RunLine(self._context, run)
        line.opened.connect(lambda: self.run_opened.emit(run.run_id))
        self._lines[run.run_id] = line
        # Above the button for the rest, which stays last.
        self._column.insertWidget(len(self._lines) - 1, line)

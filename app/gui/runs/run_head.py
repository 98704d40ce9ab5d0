"""Head of a run page: name, state, actions, and progress with the main metrics."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.events import Certificate, RunSnapshot
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, ElidedLabel, IconButton, make_label, set_tooltip
from app.gui.kit.status import StatusPill
from app.gui.runs.run_actions import (
    TRACED_STEPS,
    RunActions,
    can_export,
    can_resume,
    can_save,
    can_stop,
    can_take_over,
)
from app.gui.runs.run_strip import show_time_left
from app.gui.runs.start_line import StartLine
from app.gui.session.context import Context
from app.presentation.result_text import describe_certificate
from app.telemetry.state import Status, describe_run
from app.text import (
    DASH,
    show_exponent,
    show_loss,
    show_model,
    show_moment,
    show_number,
    show_rate,
    show_share,
)

TITLE_PX = 140
"""Minimum width of a run's name, in pixels; a longer one is elided and is its own tooltip."""


class RunHead(QWidget):
    back = Signal()
    repeat_wanted = Signal(object)
    """RunSnapshot whose settings a new run should start from."""

    def __init__(self, context: Context, actions: RunActions) -> None:
        super().__init__()
        self._context, self._actions = context, actions
        self._run: RunSnapshot | None = None
        self.state = StatusPill(context.theme, Status("calm", "created"))
        self._title = ElidedLabel(role="title")
        self._subtitle = ElidedLabel(role="caption")
        self.buttons = self._make_buttons()
        self.repeat = IconButton(
            context.theme,
            "copy",
            "New run with these settings",
            self._with_run(self._ask_to_repeat),
        )
        back = IconButton(context.theme, "back", "Back to all runs (Esc)", self.back.emit)
        self._title.setMinimumWidth(TITLE_PX)
        lead = QWidget()
        first = QHBoxLayout(lead)
        first.setContentsMargins(0, 0, 0, 0)
        first.setSpacing(8)
        first.addWidget(back)
        first.addWidget(self._title, 1)
        first.addWidget(self.state)
        row = FlowLayout(lead=lead)
        for button in (self.repeat, *self.buttons.values()):
            row.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(row)
        # Below the title, which stands after the back button.
        self._subtitle.setContentsMargins(back.sizeHint().width() + first.spacing(), 0, 0, 0)
        column.addWidget(self._subtitle)

    def show_run(self, run: RunSnapshot) -> None:
        self._run = run
        self._title.setText(run.name)
        started = show_moment(run.started_s or run.created_s, self._context.cluster.now_s())
        parts = (
            show_model(run.spec.model),
            f"on {', '.join(run.nodes) or DASH}",
            f"attempt {run.attempt}",
        )
        self._subtitle.setText(" \u00b7 ".join((*parts, f"started {started}", run.run_id)))
        silent = bool(run.silent_nodes)
        self.state.show_status(describe_run(run.state, run.phase, is_silent=silent))
        self.buttons["stop"].setVisible(can_stop(run))
        self.buttons["save"].setVisible(can_save(run))
        self.buttons["trace"].setVisible(can_save(run))
        self.buttons["resume"].setVisible(can_resume(run))
        self.buttons["take_over"].setVisible(can_take_over(run))
        self.buttons["chat"].setVisible(can_export(run))
        self.buttons["export"].setVisible(can_export(run))

    def _make_buttons(self) -> dict[str, Button]:
        theme = self._context.theme
        return {
            "chat": Button(
                theme,
                "Chat\u2026",
                self._with_run(self._actions.chat),
                icon="chat",
                tip="Chat with the base model, checkpoints and artifacts side by side",
            ),
            "export": Button(
                theme,
                "Export\u2026",
                self._with_run(self._actions.export),
                icon="export",
                tip="Turn a checkpoint into a model that you can use elsewhere",
            ),
            "resume": Button(
                theme,
                "Resume\u2026",
                self._with_run(self._actions.resume),
                icon="resume",
                role="primary",
                tip="Continue from a checkpoint, on the same or different nodes",
            ),
            "take_over": Button(
                theme,
                "Take over\u2026",
                self._with_run(self._actions.take_over),
                icon="resume",
                tip="Let this PC resume another master's run after a loss",
            ),
            "trace": Button(
                theme,
                "Profile",
                self._with_run(self._actions.trace),
                icon="trace",
                tip=f"Record the next {TRACED_STEPS} steps of every rank as a Chrome trace",
            ),
            "save": Button(
                theme,
                "Save now",
                self._with_run(self._actions.save),
                icon="save",
                tip="Write a checkpoint after the current step; training continues",
            ),
            "stop": Button(
                theme,
                "Stop",
                self._with_run(self._actions.stop),
                icon="stop",
                tip="Write a checkpoint, then end the run on every node",
            ),
        }

    def _ask_to_repeat(self, run: RunSnapshot) -> None:
        self.repeat_wanted.emit(run)

    def _with_run(self, act: Callable[[RunSnapshot], None]) -> Callable[[], None]:
        # Read at the click: the page shows one run after the other.
        def act_on_shown() -> None:
            if self._run is not None:
                act(self._run)

        return act_on_shown


class RunProgress(QFrame):
    """Progress bar with the main metrics of the run."""

    _FIGURES = (
        ("step", "Step", "Optimizer steps done, of the total"),
        ("left", "Time left", "At the speed of the recent steps"),
        ("loss", "Loss", "Loss of the newest step, over all ranks"),
        ("perplexity", "Perplexity", "exp of the newest evaluation loss"),
        ("speed", "Throughput", "Tokens trained per second, all devices together"),
        (
            "mfu",
            "MFU",
            "Model FLOPs utilization: arithmetic of the model as a share of what the "
            "devices could do",
        ),
        ("eta", "Efficiency", "Throughput as a share of the sum of what each rank reaches alone"),
        ("rate", "Learning rate", "Learning rate of the newest step"),
        ("checkpoint", "Newest checkpoint", "Step that a resume would start from"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("panel")
        self.line = StartLine()
        self.figures: dict[str, QLabel] = {}
        self._captions: dict[str, QLabel] = {}
        row = FlowLayout(gap_px=24, line_gap_px=10)
        for key, caption, tip in self._FIGURES:
            self.figures[key] = make_label(role="figure")
            self._captions[key] = make_label(caption, "caption")
            cell = QWidget()
            box = QVBoxLayout(cell)
            box.setContentsMargins(0, 0, 0, 0)
            box.setSpacing(0)
            for label in (self.figures[key], self._captions[key]):
                set_tooltip(label, tip)
                box.addWidget(label)
            row.addWidget(cell)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 12, 20, 10)
        column.setSpacing(8)
        column.addLayout(row)
        column.addWidget(self.line)
        self.certificate = ElidedLabel(role="caption")
        self.interruptions = ElidedLabel(role="caption")
        for label in (self.certificate, self.interruptions):
            column.addWidget(label)
            label.hide()

    def show_run(self, run: RunSnapshot, read_clock: Callable[[], float]) -> None:
        """Show a run; the clock is that of the node that its start waits for."""
        # The last speeds of a run that has ended would look like current ones.
        is_running = run.state == "running"
        share = run.step / run.total_steps if run.step and run.total_steps else 0.0
        self.line.show_share(share)
        self.line.show_start(run.starting, read_clock)
        total = f" / {run.total_steps:,}" if run.total_steps else ""
        self._show("step", DASH if run.step is None else f"{run.step:,}{total}")
        self._captions["step"].setText(f"Step \u00b7 {show_share(share)}" if share else "Step")
        self._show("left", show_time_left(run.remaining_s if is_running else None))
        self._show("loss", show_loss(run.loss))
        first = show_loss(run.first_loss)
        self._captions["loss"].setText(f"Loss, first {first}" if run.first_loss else "Loss")
        self._show("speed", show_rate(run.tokens_per_s if is_running else None))
        self._show("perplexity", show_loss(run.perplexity))
        set_tooltip(
            self.figures["perplexity"], f"Newest evaluation loss: {show_loss(run.evaluation_loss)}"
        )
        self._show("mfu", show_share(run.mfu if is_running else None, 1))
        self._show("eta", show_share(run.eta if is_running else None))
        self._show("rate", show_exponent(run.learning_rate))
        self._show("checkpoint", show_number(run.newest_checkpoint_step))
        self._show_certificate(run.certificate)

    def show_interruptions(self, text: str) -> None:
        """Show the story of the run's interruptions in one line; empty: no interruption."""
        self.interruptions.setVisible(bool(text))
        self.interruptions.setText(f"{text}. See Recovery below." if text else "")

    def _show_certificate(self, found: Certificate | None) -> None:
        self.certificate.setVisible(found is not None and found.kept)
        if found is not None:
            self.certificate.setText(f"Resume verified: {describe_certificate(found)}")

    def _show(self, key: str, text: str) -> None:
        self.figures[key].setText(text)
        # A screen reader would read the figure without its caption.
        self.figures[key].setAccessibleName(f"{self._captions[key].text()}: {text}")

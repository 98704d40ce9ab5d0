"""The line below a run's figures: the phase of its start, then the progress of its steps.

Both take the same height, so that nothing moves when the first step is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QSizePolicy, QStackedLayout, QWidget

from app.events import PhaseProgress, RunSnapshot
from app.gui.kit.primitives import ElidedLabel
from app.gui.runs.run_strip import PROGRESS_STEPS
from app.gui.session.live_state import LiveState
from app.presentation.start_text import describe_start, find_share

START_BAR_PX = 220
"""Width of the bar of a phase, next to its sentence, in pixels."""
COUNT_MS = 1000
"""Interval between updates of the sentence of a start, in milliseconds."""


def read_clock(cluster: LiveState, run: RunSnapshot) -> float:
    """Return the time by the clock of the node that a start waits for."""
    # A run on one node does not name it again.
    node = (run.starting.node if run.starting else "") or next(iter(run.nodes), "")
    return cluster.now_s() + (cluster.telemetry.clock_offset(node) or 0.0)


class StartLine(QWidget):
    """Shows a start in words with a bar of its phase, or the bar of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = _make_bar("Progress of the run")
        self.text = ElidedLabel(role="caption")
        self.phase_bar = _make_bar("Progress of this phase")
        self.phase_bar.setFixedWidth(START_BAR_PX)
        self._start = QWidget()
        row = QHBoxLayout(self._start)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(16)
        row.addWidget(self.text, 1)
        row.addWidget(self.phase_bar)
        # A bar whose share is not known keeps its place: the sentence would move otherwise.
        policy = self.phase_bar.sizePolicy()
        policy.setRetainSizeWhenHidden(True)
        self.phase_bar.setSizePolicy(policy)
        self._steps = QWidget()
        steps = QHBoxLayout(self._steps)
        steps.setContentsMargins(0, 0, 0, 0)
        steps.addWidget(self.bar)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self._steps)
        self._stack.addWidget(self._start)
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self._progress: PhaseProgress | None = None
        self._read_clock: Callable[[], float] = time.time
        self._timer = QTimer(self, interval=COUNT_MS)
        self._timer.timeout.connect(self.count)

    @property
    def is_starting(self) -> bool:
        """True while it shows a start."""
        return self._stack.currentWidget() is self._start

    def show_start(self, progress: PhaseProgress | None, read_clock: Callable[[], float]) -> None:
        """Show a start, counted by its node's clock from now on; None: the bar of the run."""
        self._progress, self._read_clock = progress, read_clock
        self._stack.setCurrentWidget(self._steps if progress is None else self._start)
        if progress is None:
            self._timer.stop()
            return
        self.count()
        if not self._timer.isActive():
            self._timer.start()

    def count(self) -> None:
        """Update the time of the start: its node reports only changes of phase and share."""
        progress = self._progress
        if progress is None:
            return
        now_s = self._read_clock()
        self.text.setText(describe_start(progress, now_s))
        elapsed_s = max(0.0, now_s - progress.time_s) if progress.time_s is not None else 0.0
        share = find_share(progress, elapsed_s)
        self.phase_bar.setVisible(share is not None)
        self.phase_bar.setValue(round((share or 0.0) * PROGRESS_STEPS))

    def show_share(self, share: float) -> None:
        """Show the share of the run's steps that is done, 0 to 1."""
        self.bar.setValue(round(share * PROGRESS_STEPS))


def _make_bar(name: str) -> QProgressBar:
    bar = QProgressBar()
    bar.setRange(0, PROGRESS_STEPS)
    bar.setTextVisible(False)
    bar.setAccessibleName(name)
    return bar

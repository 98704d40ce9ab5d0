"""Progress and result of each export job."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QProgressBar, QVBoxLayout, QWidget

from app.flows.export import PHASES, ExportJob
from app.gui.kit.primitives import (
    Button,
    ElidedLabel,
    copy_to_clipboard,
    make_label,
    make_panel,
    make_selectable,
)
from app.gui.kit.status import StatusPill
from app.gui.kit.theme import Theme
from app.gui.session.export_board import ExportBatch, ExportProgress
from app.presentation.result_text import describe_verdict
from app.telemetry.state import Status
from app.text import show_duration

_WORDS = {
    "waiting": Status("calm", "Waiting"),
    "now": Status("busy", "Running"),
    "failed": Status("error", "Failed"),
    "cancelled": Status("warning", "Cancelled"),
}


class ProgressRow(QWidget):
    """One job: state, phase, and finally its verdict."""

    chat_wanted = Signal(str)
    """Folder of the artifact to chat with."""

    def __init__(self, theme: Theme, job: ExportJob) -> None:
        super().__init__()
        # Output folder; the artifact's own path once it is made.
        self._folder = job.folder
        self.state = StatusPill(theme, _WORDS["waiting"])
        self.bar = QProgressBar(minimum=0, maximum=len(PHASES))
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(f"Progress of {job.label}")
        self.phase = ElidedLabel(role="caption")
        self._time: QLabel = make_label(role="caption")
        self.result = make_selectable(make_label(wraps=True))
        self._buttons_row = QWidget()
        buttons = QHBoxLayout(self._buttons_row)
        buttons.setContentsMargins(0, 0, 0, 0)
        buttons.setSpacing(8)
        copy = Button(theme, "Copy path", lambda: copy_to_clipboard(self._folder), icon="copy")
        chat = Button(theme, "Chat", lambda: self.chat_wanted.emit(self._folder), icon="chat")
        for button in (copy, chat):
            buttons.addWidget(button)
        buttons.addStretch(1)
        panel = make_panel()
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(panel)
        column = QVBoxLayout(panel)
        column.setContentsMargins(16, 12, 16, 12)
        column.setSpacing(6)
        head = QHBoxLayout()
        head.addWidget(make_label(job.label, "subheading"), 1)
        head.addWidget(self.state)
        column.addLayout(head)
        column.addWidget(self.bar)
        status = QHBoxLayout()
        status.addWidget(self.phase, 1)
        status.addWidget(self._time, 0, Qt.AlignmentFlag.AlignRight)
        column.addLayout(status)
        column.addWidget(self.result)
        column.addWidget(self._buttons_row)

    def show_row(self, row: ExportProgress) -> None:
        """Show the progress of the job."""
        is_now = row.state == "now"
        # A full bar next to a verdict would say the same twice.
        self.bar.setVisible(is_now)
        self.bar.setValue(row.phase)
        self.phase.setVisible(is_now)
        self.phase.setText(f"{PHASES[row.phase]}: {row.line}" if row.line else PHASES[row.phase])
        self._time.setVisible(row.ended_s is not None)
        if row.began_s is not None and row.ended_s is not None:
            self._time.setText(show_duration(row.ended_s - row.began_s))
        self._buttons_row.setVisible(row.made is not None)
        self.result.setVisible(row.made is not None or bool(row.problem))
        if row.made is None:
            self.state.show_status(_WORDS.get(row.state, _WORDS["waiting"]))
            self.result.setText(row.problem)
            return
        self._folder = str(row.made.path)
        # One bad type of several makes the whole job worth a review.
        keeps = all(verdict.keep for verdict in row.made.verdicts)
        self.state.show_status(Status("good", "Keep") if keeps else Status("warning", "Review"))
        measured = [describe_verdict(verdict) for verdict in row.made.verdicts]
        self.result.setText("\n".join((*measured, self._folder)))


class ProgressPage(QWidget):
    """All jobs of a batch."""

    chat_wanted = Signal(str)

    def __init__(self, theme: Theme, batch: ExportBatch) -> None:
        super().__init__()
        self._batch = batch
        self.rows = [ProgressRow(theme, row.job) for row in batch.rows]
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        for row in self.rows:
            row.chat_wanted.connect(self.chat_wanted)
            column.addWidget(row)
        column.addStretch(1)
        batch.changed.connect(self.draw)
        self.draw()

    def draw(self) -> None:
        """Show the progress of all jobs."""
        for shown, row in zip(self.rows, self._batch.rows, strict=True):
            shown.show_row(row)

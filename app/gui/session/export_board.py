"""Exports that are being set up or are running; they outlive the wizard that started them.

Each run has at most one draft and one batch. A batch runs its jobs one after the other, so that
they do not compete for a GPU; a failed job does not stop those after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QObject, Signal

from agents.contract.messages import Progress
from app.core.artifacts import ExportModel
from app.errors import RacklessError, describe_error
from app.events import ExportedModel
from app.flows.export import ExportAnswers, ExportJob, Step, list_jobs, place_phase
from app.gui.session.bridge import Bridge, Op, work_of

JobState = Literal["waiting", "now", "done", "failed", "cancelled"]


@dataclass(slots=True)
class Draft:
    """Answers and current step of a wizard that was closed."""

    answers: ExportAnswers
    step: Step = "what"


@dataclass(slots=True)
class ExportProgress:
    """Progress of one job."""

    job: ExportJob
    state: JobState = "waiting"
    phase: int = 0
    line: str = ""
    """Latest line of progress."""
    began_s: float | None = None
    ended_s: float | None = None
    made: ExportedModel | None = None
    problem: str = ""


class ExportBatch(QObject):
    """The jobs of one wizard, run in order."""

    changed = Signal()

    def __init__(
        self, bridge: Bridge, run_id: str, answers: ExportAnswers, now_s: Callable[[], float]
    ) -> None:
        super().__init__()
        self._bridge, self.run_id, self.answers = bridge, run_id, answers
        self._now_s = now_s
        self.rows = [ExportProgress(job) for job in list_jobs(run_id, answers)]
        self._op: Op | None = None

    @property
    def is_over(self) -> bool:
        return all(row.state not in ("waiting", "now") for row in self.rows)

    def start(self) -> None:
        """Start the first waiting job; called again when it ends, until none waits."""
        row = next((one for one in self.rows if one.state == "waiting"), None)
        if row is None:
            self._op = None
            self.changed.emit()
            return
        row.state, row.began_s = "now", self._now_s()
        job = row.job
        self._op = self._bridge.run(
            work_of(ExportModel(request=job.request, out=Path(job.folder))),
            lambda made: self._finish(row, made),
            lambda error: self._fail(row, error),
            lambda event: self._show_progress(row, event),
            at_close=f"Exporting {job.label} stops. Finished files are kept.",
        )
        self.changed.emit()

    def cancel(self) -> None:
        """Cancel the running job, on its node too, and skip the waiting ones."""
        if self._op is not None:
            # No callback comes after this, so the row is moved on below.
            self._op.cancel()
            self._op = None
        for row in self.rows:
            if row.state == "now":
                row.ended_s = self._now_s()
            if row.state in ("waiting", "now"):
                row.state = "cancelled"
        self.changed.emit()

    def tick(self) -> None:
        """Update the elapsed time of the running job."""
        for row in self.rows:
            if row.state == "now":
                row.ended_s = self._now_s()
        self.changed.emit()

    def _show_progress(self, row: ExportProgress, event: object) -> None:
        if isinstance(event, Progress):
            # The phase never goes back: an agent of another version may report one that is unknown
            # here.
            row.line, row.phase = event.message, place_phase(event.phase, row.phase)
            self.changed.emit()

    def _finish(self, row: ExportProgress, made: ExportedModel) -> None:
        # A job ends before the next one starts: two at once would compete for a GPU.
        row.state, row.made, row.ended_s = "done", made, self._now_s()
        self.start()

    def _fail(self, row: ExportProgress, error: RacklessError) -> None:
        # The jobs that still wait run all the same: they do not depend on this one.
        row.state, row.problem, row.ended_s = "failed", describe_error(error), self._now_s()
        self.start()


class ExportBoard:
    """Drafts and batches of one window, by run id."""

    def __init__(self) -> None:
        self.drafts: dict[str, Draft] = {}
        self.batches: dict[str, ExportBatch] = {}

    def begin(
        self, bridge: Bridge, run_id: str, answers: ExportAnswers, now_s: Callable[[], float]
    ) -> ExportBatch:
        """Start a batch for these answers, and drop the draft of the run."""
        batch = ExportBatch(bridge, run_id, answers, now_s)
        self.batches[run_id] = batch
        # The batch keeps the answers from here on; the wizard would prefer an older draft to them.
        self.drafts.pop(run_id, None)
        batch.start()
        return batch

"""Exports that are asked for or under way: they go on while their window is closed.

One draft and one batch per run. A batch makes its jobs one after the other, so that they do not
fight for a GPU; one that fails does not keep the others from being made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QObject, Signal

from app.errors import RacklessError, describe_error
from app.events import ExportedModel
from app.flows.export import ExportAnswers, ExportJob, Step, find_phase, list_jobs
from app.gui.session.bridge import Bridge, Op

JobState = Literal["waiting", "now", "done", "failed", "cancelled"]


@dataclass(slots=True)
class Draft:
    """What was answered so far, and where one has left."""

    answers: ExportAnswers
    step: Step = "what"


@dataclass(slots=True)
class ExportProgress:
    """How far one job is."""

    job: ExportJob
    state: JobState = "waiting"
    phase: int = 0
    line: str = ""
    """What it does just now."""
    began_s: float | None = None
    ended_s: float | None = None
    made: ExportedModel | None = None
    problem: str = ""


class ExportBatch(QObject):
    """The jobs of one wizard."""

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
        """Begin with the first job that waits."""
        row = next((one for one in self.rows if one.state == "waiting"), None)
        if row is None:
            self._op = None
            self.changed.emit()
            return
        row.state, row.began_s = "now", self._now_s()
        job = row.job
        self._op = self._bridge.run(
            lambda core, report: core.artifacts.export(job.request, Path(job.folder), report),
            lambda made: self._finish(row, made),
            lambda error: self._fail(row, error),
            lambda line: self._hear(row, str(line)),
        )
        self.changed.emit()

    def cancel(self) -> None:
        """End the job that is made now, on its node too, and leave out the others."""
        if self._op is not None:
            self._op.cancel()
            self._op = None
        for row in self.rows:
            if row.state == "now":
                row.ended_s = self._now_s()
            if row.state in ("waiting", "now"):
                row.state = "cancelled"
        self.changed.emit()

    def tick(self) -> None:
        """Let the time of what is made now go on."""
        for row in self.rows:
            if row.state == "now":
                row.ended_s = self._now_s()
        self.changed.emit()

    def _hear(self, row: ExportProgress, line: str) -> None:
        row.line, row.phase = line, find_phase(line, row.phase)
        self.changed.emit()

    def _finish(self, row: ExportProgress, made: ExportedModel) -> None:
        row.state, row.made, row.ended_s = "done", made, self._now_s()
        self.start()

    def _fail(self, row: ExportProgress, error: RacklessError) -> None:
        row.state, row.problem, row.ended_s = "failed", describe_error(error), self._now_s()
        self.start()


class ExportBoard:
    """Of one window, by run."""

    def __init__(self) -> None:
        self.drafts: dict[str, Draft] = {}
        self.batches: dict[str, ExportBatch] = {}

    def is_busy(self) -> bool:
        """Tell whether one is being made."""
        return any(not batch.is_over for batch in self.batches.values())

    def begin(
        self, bridge: Bridge, run_id: str, answers: ExportAnswers, now_s: Callable[[], float]
    ) -> ExportBatch:
        """Start making what was asked for; the draft is done with."""
        batch = ExportBatch(bridge, run_id, answers, now_s)
        self.batches[run_id] = batch
        self.drafts.pop(run_id, None)
        batch.start()
        return batch

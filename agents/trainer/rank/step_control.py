"""Control requests to a rank while it trains: stop, save now, record a few steps.

Stopping is a signal, which any rank may get. Other requests are files from the agent (see
`agents.supervisor.control_requests`), which only rank 0 polls. Both become slots of the step's
statistics, so all ranks learn of them after the same step without further messages.

A SIGTERM without a user's request comes from the system, most often at a shutdown of the PC. Ranks
of other nodes need not stop for it: if they can continue alone, this rank just ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from agents.contract.run import ControlRequest
from agents.contract.run_layout import STOP_FILE
from agents.supervisor.control_requests import take_requests
from agents.trainer.rank.journal import RankJournal

SLOTS = ("stop", "save", "trace", "too_hot")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepControl:
    """Actions after a step that all ranks have agreed on."""

    stop: bool = False
    save: bool = False
    trace_steps: int = 0
    """Number of steps to record from now on."""
    cool: bool = False
    """True to pause until the GPU of some rank is cooler."""

    @classmethod
    def read(cls, sums: Mapping[str, float]) -> StepControl:
        """Return the actions from the values of `SLOTS`, summed over the ranks."""
        return cls(
            stop=sums["stop"] > 0,
            save=sums["save"] > 0,
            trace_steps=int(sums["trace"]),
            cool=sums["too_hot"] > 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HotGpu:
    """A GPU that has to cool down before its rank continues."""

    gpu: str
    """Name for users."""
    celsius: float
    """Temperature at the start of the pause, in degrees Celsius."""
    until_celsius: float
    """Temperature at which training continues, in degrees Celsius."""


@dataclass(slots=True)
class RankControl:
    """Pending requests of this rank."""

    folder: Path
    """Folder of the attempt."""
    rank: int
    """Position among the ranks; the first one polls."""
    stop_requested: bool = False
    is_outside: bool = False
    """True if the system, not a user, asked it to stop."""
    leaves_alone: bool = False
    """True if the other nodes continue without this rank after the system ends it."""
    hot_gpu: HotGpu | None = None
    """GPU of this rank while it has to cool down; see `heat_watch`."""
    _pending: list[ControlRequest] = field(default_factory=list)

    def listen(self) -> None:
        """Handle SIGTERM and SIGINT as requests to stop."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_outside = number == signal.SIGTERM and not (self.folder / STOP_FILE).exists()
        if self.is_outside and self.leaves_alone:
            # The default handler, so that the exit status names the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Only noted: the current step ends first, and a checkpoint follows it.
        self.stop_requested = True

    def poll(self) -> dict[str, float]:
        """Read new requests, once per step; return this rank's values of `SLOTS`."""
        if self.rank == 0:
            self._pending += take_requests(self.folder)
        return {
            "stop": self.stop_requested,
            "save": any(request.kind == "save" for request in self._pending),
            "trace": max((r.num_steps for r in self._pending if r.kind == "trace"), default=0),
            "too_hot": self.hot_gpu is not None,
        }

    def acknowledge(self, journal: RankJournal, step: int) -> None:
        """Record in the journal that all ranks carry out the requests after `step`."""
        for request in self._pending:
            # Names in files, which masters of earlier versions read.
            journal.write("wish", wish_id=request.wish_id, wish=request.kind, step=step)
        self._pending.clear()

"""What is asked of this rank while it trains: to stop, to save now, to record a few steps.

Stopping is a signal, which any rank may get. Everything else is left as a file by the agent (see
`agents.supervisor.control_requests`), and only rank 0 looks for it. Both become slots of the
step's statistics, so that all ranks know of them after the same step and nothing more is sent or
waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from agents.contract.run import ControlRequest
from agents.supervisor.control_requests import take_wishes
from agents.trainer.rank.journal import RankJournal

SLOTS = ("stop", "save", "trace")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepControl:
    """What all ranks do after a step."""

    stop: bool = False
    save: bool = False
    trace_steps: int = 0
    """How many steps to record from now on."""

    @classmethod
    def read(cls, sums: Mapping[str, float]) -> StepControl:
        """Read it from the slots, summed over the ranks."""
        return cls(stop=sums["stop"] > 0, save=sums["save"] > 0, trace_steps=int(sums["trace"]))


@dataclass(slots=True)
class RankControl:
    """The wishes that this rank has heard and that are not granted yet."""

    folder: Path
    """Of the attempt."""
    rank: int
    stop_requested: bool = field(default=False)
    _heard: list[ControlRequest] = field(default_factory=list)

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as a request to stop."""
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def poll(self) -> dict[str, float]:
        """Look for new wishes; return this rank's values of `SLOTS`. Once per step."""
        if self.rank == 0:
            self._heard += take_wishes(self.folder)
        return {
            "stop": self.stop_requested,
            "save": any(wish.kind == "save" for wish in self._heard),
            "trace": max((w.num_steps for w in self._heard if w.kind == "trace"), default=0),
        }

    def acknowledge(self, journal: RankJournal, step: int) -> None:
        """Note for whoever asked that all ranks act on the wishes, after `step`."""
        for wish in self._heard:
            journal.write("wish", wish_id=wish.wish_id, wish=wish.kind, step=step)
        self._heard.clear()

"""Context that all parts of one rank share: its place in the attempt and its channels."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from agents.contract.run import RankPlacement
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.group import Group
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.start_progress import StartProgress
from agents.trainer.rank.state_guard import StateGuard
from agents.trainer.rank.step_control import RankControl


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """Identity and channels of one rank; created once it has joined its group."""

    attempt: RankAttempt
    group: Group
    device: torch.device
    journal: RankJournal
    heartbeat: Heartbeat
    control: RankControl
    progress: StartProgress
    """Reports the progress of this rank before its first step."""
    guard: StateGuard = field(default_factory=StateGuard)
    """Held while the trained state changes."""
    model_hash: Future[str] | None = None
    """Hash of the model, if this rank started to compute it before torch was imported."""

    @property
    def placements(self) -> tuple[RankPlacement, ...]:
        """Node and device of each rank of the current group, in order."""
        return tuple(self.attempt.intent.ranks[number] for number in self.group.members)

    def count(self, *flags: bool) -> list[int]:
        """Return the number of ranks that set each flag; all ranks call this together.

        Raises:
            PeerLost: another rank is gone.
        """
        sums = torch.tensor([float(flag) for flag in flags], device=self.device)
        # The supervisor must not take this wait for a hang of this rank.
        with self.heartbeat.waiting():
            self.group.sum(sums)
            numbers = [int(number) for number in sums.tolist()]
        self.group.require_whole()
        return numbers

    def enter_phase(self, phase: str, step: int, expected_s: float | None = None) -> None:
        """Report the current work to users (journal) and to the supervisor (heartbeat).

        Args:
            phase: current work.
            step: number of finished steps.
            expected_s: expected duration, in seconds; None if not known.
        """
        expected = {} if expected_s is None else {"expected_s": expected_s}
        self.journal.write("phase", phase=phase, **expected)
        self.heartbeat.beat(step, phase)

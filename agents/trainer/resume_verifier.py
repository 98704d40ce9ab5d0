"""Compare the first steps of a resumed run with the log of an earlier attempt.

There are two separate promises. A: on the same devices in the same order with the same versions
every loss is bit-equal. B: on any other devices the samples are the same in the same order, and the
losses differ only by rounding. A replay on the same devices uses the logged shares and saves where
the earlier attempt did (saving makes ranks equal), so that shares that followed the speeds of that
time do not hide a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from agents.contract.run import LoggedStep, RankPlacement, Replay
from agents.trainer.rank.journal import RankJournal

Promise = Literal["A", "B"]

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Maximum relative difference of a loss that counts as rounding. Another order of the same sums
changes a loss by a few units in its last place, and later optimizer steps amplify that; measured in
fp32: 3e-9 over 8 steps of a tiny model on 3 ranks instead of 2, 5e-7 over 20 steps on two H200s
instead of a CPU.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeReport:
    """Result of the comparison, in the form of the journal."""

    promise: Promise
    first_step: int
    last_step: int
    steps: int
    """Number of compared steps."""
    equal_to_the_bit: bool
    largest_difference: float
    """Largest difference of a loss, relative to the logged one."""
    other_samples: int
    """Number of steps with samples that differ from the logged ones."""
    kept: bool
    """True if the promise holds."""


def choose_promise(
    replay: Replay,
    ranks: Sequence[RankPlacement],
    saved_on: Sequence[tuple[str, str]],
    *,
    same_versions: bool,
    same_layers: bool = True,
    at_loss: bool = False,
) -> Promise:
    """Return the promise that a resume has to keep.

    Args:
        replay: logged steps and their devices.
        ranks: ranks of this attempt.
        saved_on: node and device of each rank when the checkpoint was written.
        same_versions: True if the libraries still have the same versions.
        same_layers: True if each rank still has the same layers.
        at_loss: True if one rank saved the checkpoint alone, so ranks were not made equal.
    """
    devices = tuple((rank.node, rank.device_id) for rank in ranks)
    alike = devices == replay.devices == tuple(saved_on)
    return "A" if alike and same_versions and same_layers and not at_loss else "B"


class ResumeVerifier:
    """Compares the steps of a resumed run one by one; the last one writes the certificate."""

    def __init__(
        self, replay: Replay, promise: Promise, precision: torch.dtype, journal: RankJournal
    ) -> None:
        self._steps = {logged.step: logged for logged in replay.steps}
        self._promise = promise
        self._limit = ROUNDING[precision]
        self._journal = journal
        # Step, relative difference of its loss, and whether its samples are the same.
        self._compared: list[tuple[int, float, bool]] = []

    def find_logged(self, step: int) -> LoggedStep | None:
        """Return the logged step to repeat exactly; None if this step need not be exact."""
        return self._steps.get(step) if self._promise == "A" else None

    def relax(self) -> None:
        """Expect rounding from now on, since ranks have changed since the logged steps."""
        self._promise = "B"

    def compare(self, step: int, loss: float, samples: str, *, ends: bool) -> None:
        """Compare a step; write the certificate after the last one, or when the run ends."""
        logged = self._steps.get(step)
        if logged is None:
            return
        # Hexadecimal, since decimals would round the last bit, which promise A is about.
        then = float.fromhex(logged.loss_hex)
        # `tiny` in case a loss of 0 was logged.
        difference = abs(loss - then) / max(abs(then), torch.finfo(torch.float64).tiny)
        self._compared.append((step, difference, samples == logged.samples))
        # Also when the run ends early: the comparison so far is worth knowing.
        if ends or len(self._compared) == len(self._steps):
            self._journal.write("certificate", **asdict(self._summarize()))
            self._steps.clear()

    def _summarize(self) -> ResumeReport:
        largest = max(difference for _, difference, _ in self._compared)
        other_samples = sum(not same for *_, same in self._compared)
        allowed = 0.0 if self._promise == "A" else self._limit
        return ResumeReport(
            promise=self._promise,
            first_step=self._compared[0][0],
            last_step=self._compared[-1][0],
            steps=len(self._compared),
            equal_to_the_bit=largest == 0.0,
            largest_difference=largest,
            other_samples=other_samples,
            kept=other_samples == 0 and largest <= allowed,
        )

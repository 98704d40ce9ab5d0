"""Faults of the wall clock of a node, which its processes read through a library of ours.

All nodes share the clock of this PC. Times of files stay those of the kernel.
"""

from __future__ import annotations

import random
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.history import HOUR_S
from tests.campaign.processes import send
from tests.cluster.namespaces import run_tool

if TYPE_CHECKING:
    from tests.campaign.case import Case

SOURCE = Path(__file__).with_name("clock.c")


class ClockSet(Fault):
    name = "clock-set"
    does = "clock of a node set back or forward by an hour, then right again"
    needs = "compiler"
    is_at_start = True

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(6.0, 12.0)
        self._by_s = draw.choice((-HOUR_S, HOUR_S))

    @property
    def detail(self) -> str:
        return f"{'back' if self._by_s < 0 else 'forward'}, {self.lasts_s:.0f} s"

    @property
    def expectation(self) -> Expectation:
        return Expectation(named=(("clock of {node} was set",),), within_s=5.0)

    def prepare(self, case: Case) -> None:
        folder = case.node.folder
        self._shift = folder / "clock_shift"
        library = folder / "clock.so"
        run_tool("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE))
        self._settings = folder / "sshd_config"
        self._before = self._settings.read_text()
        variables = f"SetEnv LD_PRELOAD={library} CAMPAIGN_CLOCK={self._shift} "
        self._settings.write_text(self._before.replace("SetEnv ", variables))
        case.site.restart_sshd(case.node)

    def do(self, case: Case) -> None:
        self._shift.write_text(f"{self._by_s:.0f}\n")

    def undo(self, case: Case) -> None:
        self._shift.unlink()
        self._settings.write_text(self._before)  # for the sshd of the next boot


class ClockSetRankKill(ClockSet):
    name = "clock-set-rank-kill"
    does = "clock of a node set back or forward by an hour, a rank there is killed"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        return Expectation(named=named, within_s=1.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        super().do(case)
        send(case.find("rank"), SIGKILL)


KINDS = (ClockSet, ClockSetRankKill)

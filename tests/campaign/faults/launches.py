"""Faults of runs that are launched, load, or are stopped."""

from __future__ import annotations

import random
import time
from signal import SIGKILL
from typing import TYPE_CHECKING

from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.faults.processes import Reboot
from tests.campaign.processes import send, wait_for_none
from tests.campaign.site import wait_until

if TYPE_CHECKING:
    from tests.campaign.case import Case

SETTLE_S = 60.0
"""Time for a start that was cut to leave nothing behind, in seconds."""
STOPPED_S = 30.0
"""Time for a stopped run to end on a node that comes back, in seconds."""


class RankKillLoading(Fault):
    name = "rank-kill-loading"
    does = "kill -9 of a rank that imports, loads or makes its first step"
    is_at_start = strikes_while_loading = True

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._after_s = draw.uniform(0.0, 8.0)

    @property
    def detail(self) -> str:
        return f"after {self._after_s:.1f} s"

    @property
    def expectation(self) -> Expectation:
        # There is no phase to name before the first heartbeat.
        named = (("rank {rank}", "{node}", "sigkill"), ("rank {rank}", "{node}", "killed by"))
        return Expectation(named=named, within_s=1.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        time.sleep(self._after_s)
        case.fault_s = time.time()
        send(case.find("rank"), SIGKILL)


class RebootLoading(Reboot):
    name = "reboot-loading"
    does = "a node loses its power while its rank loads"
    is_at_start = strikes_while_loading = True

    @property
    def expectation(self) -> Expectation:
        named = (("{node}", "was restarted"), ("{node}", "was lost"), ("{node}", "unreachable"))
        return Expectation(
            named=named,
            within_s=10.0 + self.lasts_s,
            recovery="recovered",
            back_s=30.0 + self.lasts_s,
            alarms=True,
        )


class CutAtStart(Fault):
    name = "cable-cut-at-start"
    does = "cable of a node cut while another run is launched, which a person then stops"
    is_at_start = True

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._after_s, self._cut_s = draw.uniform(0.5, 4.0), draw.uniform(2.0, 12.0)

    @property
    def detail(self) -> str:
        return f"{self._cut_s:.0f} s"

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def prepare(self, case: Case) -> None:
        site = case.site
        before = {run["run_id"] for run in site.master.answer("runs", "list")}
        start = site.master.start("start", str(site.run_file))
        time.sleep(self._after_s)
        site.cluster.cut(case.node)
        time.sleep(self._cut_s)
        site.cluster.heal(case.node)
        start.communicate(timeout=120)
        listed = {run["run_id"] for run in site.master.answer("runs", "list")} - before
        for run_id in listed:
            site.give_up(run_id)
            if left := wait_for_none(run_id, SETTLE_S):
                case.breaks.append(f"a cut start left {left}")
            site.master.rackless("runs", "delete", run_id)
            case.breaks += [f"a cut start left {what}" for what in site.leftovers(run_id)]

    def do(self, case: Case) -> None:
        """Nothing more: the next run starts on nodes that the cut start has left free."""


class StopWhileCut(Fault):
    name = "stop-while-cut"
    does = "a person stops the run while a node is cut off, and resumes it later"
    lasts_s = 4.0

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            recovery="recovered", back_s=self.lasts_s + STOPPED_S + 60.0, alarms=True
        )

    def do(self, case: Case) -> None:
        case.site.cluster.cut(case.node)
        case.site.master.rackless("runs", "stop", case.run_id)

    def undo(self, case: Case) -> None:
        case.site.cluster.heal(case.node)
        if left := wait_for_none(case.run_id, STOPPED_S):
            case.breaks.append(f"a stop left {left}")

        def is_resumed() -> bool:
            return case.site.master.rackless("runs", "resume", case.run_id).code == 0

        wait_until(is_resumed, "a resume", STOPPED_S)


KINDS = (RankKillLoading, RebootLoading, CutAtStart, StopWhileCut)

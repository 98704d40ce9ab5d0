"""Faults of runs that are launched, load, or are stopped."""

from __future__ import annotations

import random
import time
from signal import SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

from tests.campaign.faults.combined import begin_to_watch
from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.faults.processes import RankFrozen, Reboot
from tests.campaign.processes import send, wait_for_none
from tests.campaign.site import LOST_AFTER_S, wait_until

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


class RankStopLoading(RankKillLoading):
    name = "rank-stop-loading"
    does = "SIGSTOP of a rank that imports, loads or makes its first step, for good"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "stopped"),)
        return Expectation(
            named=named, within_s=5.0, recovery="recovered", back_s=40.0, alarms=True
        )

    def do(self, case: Case) -> None:
        time.sleep(self._after_s)
        case.fault_s = time.time()
        send(case.find("rank"), SIGSTOP)


class RankFrozenLoading(RankFrozen):
    name = "rank-frozen-loading"
    does = "the control group of a rank is frozen while it imports, loads or makes its first step"
    is_at_start = strikes_while_loading = True

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._after_s = draw.uniform(0.0, 8.0)

    def do(self, case: Case) -> None:
        time.sleep(self._after_s)
        case.fault_s = time.time()
        super().do(case)


class CutLoading(Fault):
    name = "cable-cut-loading"
    does = "cable of a node cut while the ranks load, for more than the patience"
    is_at_start = strikes_while_loading = True
    lasts_s = LOST_AFTER_S + 15.0

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._after_s = draw.uniform(0.0, 8.0)

    @property
    def expectation(self) -> Expectation:
        named = (("{node}", "was lost"), ("{node}", "not answered"))
        return Expectation(
            named=named,
            within_s=LOST_AFTER_S + 10.0,
            recovery="either",  # ranks that had not begun to wait may have noticed nothing
            back_s=self.lasts_s + 40.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        time.sleep(self._after_s)
        case.fault_s = time.time()
        case.site.cluster.cut(case.node)

    def undo(self, case: Case) -> None:
        case.site.cluster.heal(case.node)


class StopLoading(Fault):
    name = "stop-loading"
    does = "a person stops the run while its ranks import, load or begin, and resumes it"
    is_at_start = strikes_while_loading = True
    stops = 1
    longest_s = 10.0
    """Longest time before each stop, in seconds."""

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._draw = draw

    @property
    def expectation(self) -> Expectation:
        back_s = self.stops * (10.0 + 2 * STOPPED_S) + 30.0
        return Expectation(recovery="recovered", back_s=back_s, alarms=True)

    def do(self, case: Case) -> None:
        for number in range(self.stops):
            time.sleep(self._draw.uniform(0.0, self.longest_s))
            if number == 0:
                case.fault_s = time.time()
            if not stop_and_resume(case):
                if number == 0:
                    case.breaks.append("the run was done before the first stop")
                return


class KeepersStop(StopLoading):
    name = "two-keepers-stop-and-resume"
    does = "two keepers watch, and a person stops and resumes the run again and again"
    strikes_while_loading = False
    stops = 3
    longest_s = 2.0  # half of the run is left, which takes a few seconds

    def prepare(self, case: Case) -> None:
        begin_to_watch(case)


def stop_and_resume(case: Case) -> bool:
    """Stop the run as a person does; note what it left, and resume it; False: it was done."""
    case.site.master.rackless("runs", "stop", case.run_id)
    if left := wait_for_none(case.run_id, STOPPED_S):
        case.breaks.append(f"a stop left {left}")
    if case.site.run_state(case.run_id) == "done":
        return False

    def is_resumed() -> bool:
        return case.site.master.rackless("runs", "resume", case.run_id).code == 0

    wait_until(is_resumed, "a resume", STOPPED_S)
    return True


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


KINDS = (
    RankKillLoading,
    RankStopLoading,
    RankFrozenLoading,
    RebootLoading,
    CutLoading,
    CutAtStart,
    StopWhileCut,
    StopLoading,
    KeepersStop,
)

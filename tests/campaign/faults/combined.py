"""Faults of several parts at once, again and again, and of parts that few think of."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from signal import SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

from tests.campaign.faults.fault import CGROUPS, Expectation, Fault
from tests.campaign.faults.network import LongCut
from tests.campaign.keeper import Keeper
from tests.campaign.processes import find_part, send
from tests.campaign.site import LOST_AFTER_S, Stuck, wait_until

if TYPE_CHECKING:
    from tests.campaign.case import Case

WATCHED_S = 5.0
"""Time for another keeper to see all nodes and the run, in seconds; both are there."""
BACK_OFF_S = 5.0
"""Wait of a second recovery within an hour, in seconds."""


class RankSignal(Fault):
    name = "rank-signal"
    does = "a rank dies of SIGSEGV, SIGBUS, SIGABRT or SIGTERM"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._signal = draw.choice((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM))

    @property
    def detail(self) -> str:
        return self._signal.name

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", self._signal.name.lower()),)
        return Expectation(named=named, within_s=1.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        send(case.find("rank"), self._signal)


class RankSlow(Fault):
    name = "rank-slow"
    does = "a rank gets half of a core"
    needs = "cpu"
    lasts_s = 12.0

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        self._group = CGROUPS["cpu"] / f"rackless-campaign-{case.run_id}"
        self._group.mkdir()
        (self._group / "cpu.cfs_quota_us").write_text("50000")
        for pid in case.find("rank"):
            (self._group / "cgroup.procs").write_text(str(pid))

    def undo(self, case: Case) -> None:
        for pid in (self._group / "cgroup.procs").read_text().split():
            (CGROUPS["cpu"] / "cgroup.procs").write_text(pid)
        self._group.rmdir()


class StoreKill(Fault):
    name = "store-kill"
    does = "kill -9 of the store where the ranks met"

    @property
    def expectation(self) -> Expectation:
        return Expectation(recovery="either", alarms=True)

    def do(self, case: Case) -> None:
        found = [
            pid for node in case.site.nodes for pid in find_part(case.site.cluster, node, "store")
        ]
        assert found, "no node has a store"
        send(found, SIGKILL)


class AllKill(Fault):
    name = "all-of-a-node-kill"
    does = "kill -9 of all that is ours on a node, again and again for a while"
    lasts_s = 1.0

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "{node}"), ("{node}", "was lost"), ("{node}", "killed"))
        return Expectation(named=named, within_s=6.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        end = time.monotonic() + self.lasts_s
        while time.monotonic() < end:
            for part in ("supervisor", "recorder", "agent", "rank"):
                send(find_part(case.site.cluster, case.node, part), SIGKILL)
            time.sleep(0.05)


class SshdPause(Fault):
    name = "sshd-pause"
    does = "SIGSTOP of a node's sshd and its connections, then SIGCONT"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(2.0, 12.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        self._pids = case.find("sshd")
        send(self._pids, SIGSTOP)

    def undo(self, case: Case) -> None:
        send(self._pids, signal.SIGCONT)


class SecondLoss(Fault):
    name = "second-loss"
    does = "kill -9 of a rank, and of any rank again while the run recovers"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(0.5, 12.0)
        self._draw = draw

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        return Expectation(
            named=named,
            within_s=1.0,
            recovery="recovered",
            back_s=self.lasts_s + BACK_OFF_S + 20.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        send(case.find("rank"), SIGKILL)

    def undo(self, case: Case) -> None:
        node = self._draw.choice(case.site.nodes)
        send(find_part(case.site.cluster, node, "rank"), SIGKILL)


class PowerCut(Fault):
    name = "power-cut"
    does = "all nodes and the keeper lose their power, and come back"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, 6.0)

    @property
    def expectation(self) -> Expectation:
        named = (("{node}", "were restarted"), ("{node}", "was lost"))
        return Expectation(
            named=named,
            within_s=self.lasts_s + 10.0,
            recovery="recovered",
            back_s=self.lasts_s + 25.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        case.site.keeper.stop()
        for node in case.site.nodes:
            case.site.lose_power(node)

    def undo(self, case: Case) -> None:
        for node in case.site.nodes:
            case.site.cluster.heal(node)
            case.site.boot(node)
        case.site.keeper.start()


class LossWithoutMaster(Fault):
    name = "node-loss-without-master"
    does = "a node loses its power while no keeper is there; both come back later"
    needs = "three nodes"  # two cannot tell a cut from a loss

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(40.0, 60.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(
                ("without this pc", "{node}"),
                ("{node} was lost", "continued in their processes"),
            ),
            within_s=self.lasts_s + 15.0,
            recovery="recovered",
            back_s=LOST_AFTER_S + 30.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        case.site.keeper.stop()
        time.sleep(LOST_AFTER_S)
        case.fault_s = time.time()
        case.site.lose_power(case.node)

    def undo(self, case: Case) -> None:
        case.site.cluster.heal(case.node)
        case.site.boot(case.node)
        case.site.keeper.start()


class KeeperFlaps(Fault):
    name = "keeper-flaps-rank-kill"
    does = "a rank is killed, and the keeper is killed and started again and again meanwhile"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._lives_s = [draw.uniform(0.5, 5.0) for _ in range(5)]

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        flaps_s = sum(self._lives_s) + 10.0
        return Expectation(
            named=named, within_s=flaps_s, recovery="recovered", back_s=flaps_s + 20.0, alarms=True
        )

    def do(self, case: Case) -> None:
        send(case.find("rank"), SIGKILL)
        for life_s in self._lives_s:
            time.sleep(life_s)
            case.site.keeper.stop()
            case.site.keeper.start()


class CableFlaps(Fault):
    name = "cable-flaps"
    does = "cable of a node cut for moments, again and again"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._times_s = [(draw.uniform(0.2, 2.5), draw.uniform(0.3, 2.5)) for _ in range(4)]

    @property
    def expectation(self) -> Expectation:
        return Expectation(recovery="either", alarms=True)

    def do(self, case: Case) -> None:
        for cut_s, whole_s in self._times_s:
            case.site.cluster.cut(case.node)
            time.sleep(cut_s)
            case.site.cluster.heal(case.node)
            time.sleep(whole_s)


class LossWhileJoining(LongCut):
    name = "loss-while-joining"
    does = "a node that was cut off returns, and a rank is killed as the run lets it join"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        super().__init__(draw, max_cut_s)
        self._after_s = draw.uniform(0.0, 10.0)
        self._draw = draw

    def undo(self, case: Case) -> None:
        super().undo(case)
        node = self._draw.choice(case.site.nodes)

        def is_joining() -> bool:
            told = case.site.keeper.told_since(case.run_id, case.fault_s)
            return any("with all of its nodes" in line.text for line in told)

        # Near its end a run lets nobody join.
        with contextlib.suppress(Stuck):
            wait_until(is_joining, "a node that joins", 30.0)
            time.sleep(self._after_s)
            send(find_part(case.site.cluster, node, "rank"), SIGKILL)


class TwoKeepers(Fault):
    name = "two-keepers-rank-kill"
    does = "two keepers of one home watch, a rank is killed"
    is_at_start = True
    lasts_s = 20.0

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        return Expectation(named=named, within_s=2.0, recovery="recovered", alarms=True)

    def prepare(self, case: Case) -> None:
        self._other = begin_to_watch(case)

    def do(self, case: Case) -> None:
        wait_until(lambda: self._other.sees_all(case.run_id), "another keeper", WATCHED_S)
        case.fault_s = time.time()
        send(case.find("rank"), SIGKILL)

    def undo(self, case: Case) -> None:
        """Nothing more: the other keeper is ended in any case."""


def begin_to_watch(case: Case) -> Keeper:
    """Start another keeper of the same home, which ends with the fault."""
    keeper = Keeper(case.site.master)
    keeper.start()
    case.ending.callback(keeper.stop)
    return keeper


KINDS = (
    RankSignal,
    RankSlow,
    StoreKill,
    AllKill,
    SshdPause,
    SecondLoss,
    PowerCut,
    LossWithoutMaster,
    KeeperFlaps,
    CableFlaps,
    LossWhileJoining,
    TwoKeepers,
)

"""Faults of processes: killed, stopped, paused, out of memory, and whole PCs that restart."""

from __future__ import annotations

import contextlib
import random
import time
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

from tests.campaign.faults.fault import CGROUPS, Expectation, Fault
from tests.campaign.processes import send
from tests.campaign.site import wait_until

if TYPE_CHECKING:
    from tests.campaign.case import Case


class RankKill(Fault):
    name = "rank-kill"
    does = "kill -9 of a rank"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill", "phase"),)
        return Expectation(named=named, within_s=1.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        send(case.find("rank"), SIGKILL)


class RankStop(Fault):
    name = "rank-stop"
    does = "SIGSTOP of a rank, for good"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "stopped", "phase training"),)
        return Expectation(
            named=named, within_s=3.0, recovery="recovered", back_s=30.0, alarms=True
        )

    def do(self, case: Case) -> None:
        send(case.find("rank"), SIGSTOP)


class RankPause(Fault):
    name = "rank-pause"
    does = "SIGSTOP of a rank, then SIGCONT"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(0.5, 6.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(recovery="untouched", alarms=True)

    def do(self, case: Case) -> None:
        self._pids = case.find("rank")
        send(self._pids, SIGSTOP)

    def undo(self, case: Case) -> None:
        send(self._pids, SIGCONT)


class RankOom(Fault):
    name = "rank-oom"
    does = "a control group without memory for a rank"
    needs = "memory"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "memory"),)
        return Expectation(named=named, within_s=3.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        self._group = CGROUPS["memory"] / f"rackless-campaign-{case.run_id}"
        self._group.mkdir()
        # What a process has allocated before it was moved is not counted against the group.
        (self._group / "memory.limit_in_bytes").write_text("16384")
        for pid in case.find("rank"):
            (self._group / "cgroup.procs").write_text(str(pid))

    def undo(self, case: Case) -> None:
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (CGROUPS["memory"] / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.2)

    lasts_s = 4.0


class RankFrozen(Fault):
    name = "rank-frozen"
    does = "the control group of a rank is frozen, where not even kill -9 reaches it"
    needs = "freezer"
    lasts_s = 150.0

    @property
    def expectation(self) -> Expectation:
        # Where a network namespace hides the control groups, it looks like a disk that hangs.
        rank = ("rank {rank}", "node {node}")
        return Expectation(
            named=((*rank, "frozen"), (*rank, "kernel")),
            within_s=14.0,
            recovery="recovered",
            back_s=120.0,  # a rank that may wait for a disk or a server is given a minute
            alarms=True,
        )

    def do(self, case: Case) -> None:
        self._group = CGROUPS["freezer"] / f"rackless-campaign-{case.run_id}"
        self._group.mkdir()
        for pid in case.find("rank"):
            (self._group / "cgroup.procs").write_text(str(pid))
        (self._group / "freezer.state").write_text("FROZEN")

    def undo(self, case: Case) -> None:
        (self._group / "freezer.state").write_text("THAWED")
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CGROUPS["freezer"] / "cgroup.procs").write_text(pid)
        wait_until(lambda: not (self._group / "cgroup.procs").read_text(), "an empty group", 10.0)
        self._group.rmdir()


class SupervisorKill(Fault):
    name = "supervisor-kill"
    does = "kill -9 of a supervisor"
    leaves_as_before = False  # its successor adopts the ranks, and cannot learn their exit codes

    @property
    def expectation(self) -> Expectation:
        named = (("{node}", "supervisor"),)
        return Expectation(named=named, within_s=5.0, recovery="untouched")

    def do(self, case: Case) -> None:
        send(case.find("supervisor"), SIGKILL)


class SupervisorPause(Fault):
    name = "supervisor-pause"
    does = "SIGSTOP of a supervisor, then SIGCONT"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, 6.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        self._pids = case.find("supervisor")
        send(self._pids, SIGSTOP)

    def undo(self, case: Case) -> None:
        send(self._pids, SIGCONT)


class PairKill(Fault):
    name = "rank-and-supervisor-kill"
    does = "kill -9 of a rank and its supervisor"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "{node}"), ("{node}", "was lost"), ("{node}", "killed"))
        return Expectation(named=named, within_s=5.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        send([*case.find("supervisor"), *case.find("rank")], SIGKILL)


class AgentKill(Fault):
    name = "agent-kill"
    does = "kill -9 of the agents of a node"

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        send(case.find("agent"), SIGKILL)


class AgentStop(Fault):
    name = "agent-stop"
    does = "SIGSTOP of the agents of a node, then SIGCONT"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, 12.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        self._pids = case.find("agent")
        send(self._pids, SIGSTOP)

    def undo(self, case: Case) -> None:
        send(self._pids, SIGCONT)


class RecorderKill(Fault):
    name = "recorder-kill"
    does = "kill -9 of the recorder of a node"

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        send(case.find("recorder"), SIGKILL)


class SshdKill(Fault):
    name = "sshd-kill"
    does = "kill -9 of a node's sshd and its connections, then another sshd"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, 6.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(named=(("{node}", "unreachable"),), within_s=5.0)

    def do(self, case: Case) -> None:
        case.site.cluster.stop_sshd(case.node)

    def undo(self, case: Case) -> None:
        case.site.restart_sshd(case.node)


class Reboot(Fault):
    name = "reboot"
    does = "all processes of a node killed, back with another boot id"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, 8.0)

    @property
    def expectation(self) -> Expectation:
        named = (("{node}", "was restarted"), ("{node}", "was lost"))
        return Expectation(
            named=named, within_s=5.0 + self.lasts_s, recovery="recovered", alarms=True
        )

    def do(self, case: Case) -> None:
        case.site.lose_power(case.node)

    def undo(self, case: Case) -> None:
        case.site.cluster.heal(case.node)
        case.site.boot(case.node)


KINDS = (
    RankKill,
    RankStop,
    RankPause,
    RankOom,
    RankFrozen,
    SupervisorKill,
    SupervisorPause,
    PairKill,
    AgentKill,
    AgentStop,
    RecorderKill,
    SshdKill,
    Reboot,
)

"""Faults of two parts at once: of one node, or of two nodes within a second."""

from __future__ import annotations

import random
import time
from signal import SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

from agents.contract.run_layout import CHECKPOINTS
from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.faults.network import LongCut
from tests.campaign.faults.storage import fill
from tests.campaign.processes import find_part, send
from tests.campaign.site import EVERY_STEPS, wait_until

if TYPE_CHECKING:
    from tests.campaign.case import Case

SAVE_S = 60.0
"""Time for the next save to begin, in seconds."""


class PairStop(Fault):
    name = "rank-and-supervisor-stop"
    does = "SIGSTOP of a rank and its supervisor, for good"

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("rank {rank}", "node {node}", "stopped", "phase training"),),
            within_s=8.0,  # its supervisor is continued after three seconds
            recovery="recovered",
            back_s=40.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        send([*case.find("supervisor"), *case.find("rank")], SIGSTOP)


class KillWhileSaving(Fault):
    name = "all-of-a-node-kill-saving"
    does = "kill -9 of rank, supervisor and agent of a node in the middle of a save"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "{node}"), ("{node}", "was lost"), ("{node}", "killed"))
        return Expectation(named=named, within_s=6.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        # Of three nodes two save, perhaps not this one.
        runs = [case.site.run_folder(node, case.run_id) for node in case.site.nodes]
        pids = [pid for part in ("supervisor", "agent", "rank") for pid in case.find(part)]
        end = time.monotonic() + SAVE_S
        # A save takes a few milliseconds: the processes are known before.
        while time.monotonic() < end and not any(
            partial for run in runs for partial in (run / CHECKPOINTS).glob(".partial*")
        ):
            time.sleep(0.0005)
        case.fault_s = time.time()
        send(pids, SIGKILL)
        if time.monotonic() >= end:
            case.breaks.append(f"no save began within {SAVE_S:.0f} s, one each {EVERY_STEPS} steps")


class TwoLosses(Fault):
    name = "two-nodes-at-once"
    does = "a rank is killed and, within a second, the supervisor, rank or sshd of another node"
    lasts_s = 2.0

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._after_s = draw.uniform(0.0, 1.0)
        self._part = draw.choice(("supervisor", "rank", "sshd"))

    @property
    def detail(self) -> str:
        return f"{self._part}, {self._after_s:.1f} s later"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "{node}", "sigkill"), ("rank {rank}", "{node}", "killed by"))
        return Expectation(
            named=named, within_s=2.0, recovery="recovered", back_s=self.lasts_s + 25.0, alarms=True
        )

    def do(self, case: Case) -> None:
        self._other = case.others[0]
        send(case.find("rank"), SIGKILL)
        time.sleep(self._after_s)
        if self._part == "sshd":
            case.site.cluster.stop_sshd(self._other)
        else:
            send(find_part(case.site.cluster, self._other, self._part), SIGKILL)

    def undo(self, case: Case) -> None:
        if self._part == "sshd":
            case.site.restart_sshd(self._other)


class ElectionAndRank(Fault):
    name = "election-and-rank-kill"
    does = "kill -9 of the processes by which survivors regroup, then of a rank"
    needs = "three nodes"  # two nodes have none

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._after_s = draw.uniform(0.0, 4.0)

    @property
    def detail(self) -> str:
        return f"{self._after_s:.1f} s later"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        return Expectation(named=named, within_s=1.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        for node in case.site.nodes:
            send(find_part(case.site.cluster, node, "election"), SIGKILL)
        time.sleep(self._after_s)
        case.fault_s = time.time()
        send(case.find("rank"), SIGKILL)


class FullAndCut(LongCut):
    name = "full-disk-and-cable-cut"
    does = "disk of a node full, then its cable cut for more than the patience"

    def do(self, case: Case) -> None:
        self._filler = fill(case.node.home)
        super().do(case)

    def undo(self, case: Case) -> None:
        super().undo(case)
        time.sleep(self.lasts_s / 2)  # the node is there again, and cannot store a byte
        self._filler.unlink()


class SshdMoves(Fault):
    name = "sshd-moves"
    does = "sshd of a node at another port, which a person then enters"
    lasts_s = 4.0
    leaves_as_before = False

    @property
    def expectation(self) -> Expectation:
        return Expectation(named=(("{node}", "unreachable"),), within_s=5.0)

    def do(self, case: Case) -> None:
        self._enter_port(case, 22, 2222)

    def undo(self, case: Case) -> None:
        site, node = case.site, case.node

        def enter(port: int) -> None:
            address = f"root@{node.address}:{port}"
            site.master.answer("nodes", "set-address", node.name, "--ssh", address)

        enter(2222)
        wait_until(lambda: site.keeper.sees_all(case.run_id), "the node at its new port", 20.0)
        self._enter_port(case, 2222, 22)
        enter(22)

    def _enter_port(self, case: Case, old: int, new: int) -> None:
        settings = case.node.folder / "sshd_config"
        settings.write_text(settings.read_text().replace(f"Port {old}\n", f"Port {new}\n"))
        case.site.restart_sshd(case.node)


KINDS = (PairStop, KillWhileSaving, TwoLosses, ElectionAndRank, FullAndCut, SshdMoves)

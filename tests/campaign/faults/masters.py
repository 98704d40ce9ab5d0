"""Faults of masters and identities: killed, paused, two at once, changed keys, occupied ports."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.processes import send
from tests.cluster.master import Master

if TYPE_CHECKING:
    from tests.campaign.case import Case


class MasterKill(Fault):
    name = "master-kill"
    does = "kill -9 of the keeper, which is started again"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, 8.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        case.site.keeper.stop()

    def undo(self, case: Case) -> None:
        case.site.keeper.start()


class MasterAndRank(MasterKill):
    name = "master-and-rank-kill"
    does = "kill -9 of the keeper, then of a rank; the keeper comes back"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        return Expectation(
            named=named,
            within_s=self.lasts_s + 6.0,
            recovery="recovered",
            back_s=self.lasts_s + 20.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        super().do(case)
        send(case.find("rank"), SIGKILL)


class MasterPause(Fault):
    name = "master-pause"
    does = "SIGSTOP of the keeper, then SIGCONT, as a PC that sleeps"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(2.0, 15.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        assert case.site.keeper.process is not None
        self._pid = case.site.keeper.process.pid
        send([self._pid], SIGSTOP)

    def undo(self, case: Case) -> None:
        send([self._pid], SIGCONT)


class TwoMasters(Fault):
    name = "two-masters"
    does = "another master adds the nodes, watches, and starts a run on them"

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        site = case.site
        other = Master(site.cluster, site.folder / "other-master")
        if not other.home.exists():
            for node in site.nodes:
                site.add(other, node)
                other.answer("nodes", "setup", node.name, "--python", sys.executable)
        with other.start("watch", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as watch:
            try:
                answer = other.rackless("start", str(site.run_file))
                if answer.code != 1:
                    self._judge_start(case, other, answer.document["run_id"])
            finally:
                watch.kill()

    def _judge_start(self, case: Case, other: Master, run_id: str) -> None:
        """Note a start beside a run that had not ended, and end what it began."""
        site = case.site
        newest = {
            node.name: max((site.run_folder(node, case.run_id) / "attempts").iterdir(), key=_number)
            for node in site.nodes
        }
        last = max(map(_number, newest.values()))
        exits = [f / "exit.json" for f in newest.values() if _number(f) == last]
        began_s = min(
            (site.run_folder(node, run_id) / "attempts/1/intent.json").stat().st_mtime
            for node in site.nodes
        )
        other.rackless("runs", "stop", run_id)
        other.rackless("runs", "delete", run_id)
        if not all(path.exists() and path.stat().st_mtime <= began_s for path in exits):
            case.breaks.append(f"the start of another master was not refused: {run_id}")


def _number(attempt: Path) -> int:
    return int(attempt.name)


class TwoStarts(Fault):
    name = "two-starts"
    does = "two clicks on start at the same moment"
    is_at_start = True

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def prepare(self, case: Case) -> None:
        # The other click; the run that the case follows is whichever won.
        self._other = case.site.master.start("start", str(case.site.run_file))

    def do(self, case: Case) -> None:
        self._other.communicate(timeout=90)
        active = [
            run["run_id"]
            for run in case.site.master.answer("runs", "list")
            if run["state"] not in ("done", "stopped", "interrupted", "failed")
        ]
        if active != [case.run_id]:
            case.breaks.append(f"two starts made the runs {active}")


class HostKey(Fault):
    name = "host-key-changed"
    does = "another host key on a node, then the old one again"

    lasts_s = 8.0

    @property
    def expectation(self) -> Expectation:
        return Expectation(named=(("{node}", "refused"),), within_s=8.0)

    def do(self, case: Case) -> None:
        folder = case.node.folder
        self._files = {path: path.read_bytes() for path in folder.glob("host_key*")}
        case.site.cluster.change_host_key(case.node)
        case.site.restart_sshd(case.node)

    def undo(self, case: Case) -> None:
        for path, data in self._files.items():
            path.write_bytes(data)
        case.site.restart_sshd(case.node)
        # A refused node is asked again only when a person asks; a service is started again.
        case.site.keeper.stop()
        case.site.keeper.start()


class BusyPorts(Fault):
    name = "occupied-ports"
    does = "three of four ports for new sockets are taken before the start"
    is_at_start = True

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def prepare(self, case: Case) -> None:
        address = case.node.address
        program = (
            "import socket, sys, time\n"
            "held = []\n"
            "for port in range(41000, 41096):\n"
            f"    one = socket.socket(); one.bind(({address!r}, port)); one.listen()\n"
            "    held.append(one)\n"
            "print('taken', flush=True)\n"
            "time.sleep(3600)\n"
        )
        self._set_range(case, "41000 41127")
        self._taker = case.site.cluster.start(
            case.node, sys.executable, "-c", program, stdout=subprocess.PIPE, text=True
        )
        case.ending.callback(self._free, case)
        assert self._taker.stdout is not None
        assert self._taker.stdout.readline().strip() == "taken"

    def do(self, case: Case) -> None:
        """Nothing more: the run has started beside the taken ports."""

    def undo(self, case: Case) -> None:
        """Nothing more: the ports are freed in any case."""

    def _free(self, case: Case) -> None:
        self._taker.kill()
        self._taker.wait()
        self._set_range(case, "32768 60999")

    def _set_range(self, case: Case, ports: str) -> None:
        name = f"net.ipv4.ip_local_port_range={ports}"
        case.site.cluster.run(case.node, "sysctl", "-qw", name)


KINDS = (MasterKill, MasterAndRank, MasterPause, TwoMasters, TwoStarts, HostKey, BusyPorts)

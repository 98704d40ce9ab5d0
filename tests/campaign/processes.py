"""Find the processes of nodes and runs in /proc, by network namespace, command and tag."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.namespaces import Cluster, Node, is_zombie

PARTS = {
    "rank": b"agents.trainer",
    "supervisor": b"supervise",
    "agent": b"serve",
    "recorder": b"record",
    "election": b"election",
    "store": b"agents.rendezvous.server",
    "sshd": b"sshd",
}
"""Word in the command line of each kind of process."""


def command_of(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return []


def find_part(cluster: Cluster, node: Node, part: str) -> list[int]:
    """Return the processes of this kind on a node, oldest first."""
    word = PARTS[part]
    found = []
    for pid in cluster.pids(node):
        command = command_of(pid)
        if part == "sshd":
            is_one = bool(command) and word in command[0]
        elif part == "store":  # a program on the command line
            is_one = any(word in argument for argument in command)
        else:
            is_one = word in command
        if is_one and not is_zombie(pid):
            found.append(pid)
    return found


def chain_of(cluster: Cluster) -> list[int]:
    """Return the processes that notice and heal faults: all of master and nodes but the ranks."""
    spaces = {
        os.stat(f"/run/netns/{pc.namespace}").st_ino for pc in (cluster.master, *cluster.nodes)
    }
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in spaces:
                    found.append(int(entry.name))
    commands = {pid: command_of(pid) for pid in found}
    # A rank that was killed has no command any more.
    return [pid for pid, command in commands.items() if command and PARTS["rank"] not in command]


def tagged(run_id: str) -> list[int]:
    """Return every living process that carries the run's tag, on any node."""
    needle = f"RACKLESS_TAG={run_id}.".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return [pid for pid in found if not is_zombie(pid)]


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for_none(run_id: str, limit_s: float) -> list[str]:
    """Wait until no process of the run is left; return the commands of those that stay."""
    end = time.monotonic() + limit_s
    while (left := tagged(run_id)) and time.monotonic() < end:
        time.sleep(0.2)
    return [b" ".join(command_of(pid)[-4:]).decode("utf-8", "replace") for pid in left]

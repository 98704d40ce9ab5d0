"""Every socket that listens in a network namespace while something runs, with owner and reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

LOOK = """
import json, re, subprocess, time

def read_command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\\0", b" ").decode().strip()
    except OSError:  # it has gone
        return ""

while True:
    said = subprocess.run(["ss", "-Hlntuxp"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in said.splitlines():
        holders = {pid: read_command(pid) for pid in re.findall(r"pid=(\\d+)", line)}
        print(json.dumps([line, holders]), flush=True)
    time.sleep(0.05)
"""
"""A program of its own: to enter a namespace for each look would take longer than the look. It asks
at once who holds a socket, since whoever reads its lines may come late on a busy PC."""
REASONS = (
    (r"sshd", "SSH server of the PC", "the master comes this way"),
    (
        r"app\.nodes\.transport\.loopback",
        "SSH server of a demo's node",
        "stands in for another PC; takes the demo's own key alone",
    ),
    (
        r"agents\.rendezvous\.server",
        "store of an attempt or a check",
        "where ranks meet; TLS with the key of the attempt",
    ),
    (
        r"agents\.trainer\.allreduce",
        "rank of a check (Gloo)",
        "takes the other ranks; closed by a filter when all are there",
    ),
    (
        r"agents\.trainer",
        "rank of a run (Gloo)",
        "takes the other ranks; closed by a filter when all are there",
    ),
    (
        r"-m app (demo|gui)\b",
        "window",
        "a second start brings it forward; a file that its user alone may open",
    ),
    (
        r"\bspread\b",
        "node's part of a transfer",
        "takes chunks from this PC, gives them to nodes; TLS with the key of the transfer",
    ),
    (
        r"\bserve\b",
        "agent, while a check measures a link",
        "takes one caller, who has to know the greeting",
    ),
)
"""Pattern of a command line, who that is, and why it may listen; the first that fits counts."""


@dataclass(frozen=True, order=True, slots=True)
class Door:
    """A socket that waits for others."""

    where: str
    """The PC."""
    protocol: str
    address: str
    port: str
    owner: str
    """Who listens; empty: nothing of ours that may."""
    reason: str
    """Why; the command line where there is no reason."""


class Watch:
    """Looks at the listening sockets of a namespace again and again, as a context manager."""

    def __init__(self, where: str, enter: Sequence[str]) -> None:
        """Watch the namespace in which the command line `enter` runs what follows it."""
        self._where = where
        self._command = [*enter, sys.executable, "-I", "-c", LOOK]
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._seen: dict[tuple[str, str, str], Door] = {}
        self._holders: dict[tuple[str, str, str], list[str]] = {}
        self._unheld: set[tuple[str, str, str]] = set()

    def __enter__(self) -> Watch:
        self._look = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._look.kill()
        self._look.wait()
        self._thread.join()

    @property
    def doors(self) -> list[Door]:
        """All that have listened so far."""
        return sorted(self._seen.copy().values())

    def find(self, owner: str) -> list[Door]:
        """Return the doors of an owner, by the beginning of its name."""
        return [door for door in self.doors if door.owner.startswith(owner)]

    def _look_on(self) -> None:
        assert self._look.stdout is not None
        with self._look.stdout as lines:
            for said in lines:
                if said.endswith("\n"):  # else it was ended in the middle
                    self._take(*json.loads(said))

    def _take(self, line: str, commands: dict[str, str]) -> None:
        protocol, _, _, _, local, *rest = line.split()
        if protocol.startswith("u_"):  # a path or a name, and a number
            address, port = local, rest[0]
        else:
            address, _, port = local.rpartition(":")
        key = (protocol, address, port)
        known, holders = self._seen.get(key), [*commands]
        # A process may bind a socket and hand it to the one that it was bound for.
        if known is not None and known.owner and holders == self._holders[key]:
            return
        # `ss` asks who holds what before it lists, and a holder may end before it is asked for its
        # command: of such a one nobody knows yet.
        if not any(commands.values()) and key not in self._unheld:
            self._unheld.add(key)
            return
        owner, reason = explain(" | ".join(filter(None, commands.values())) or line)
        if known is None or owner:
            self._seen[key] = Door(self._where, protocol, address.strip("[]"), port, owner, reason)
            self._holders[key] = holders


def explain(command: str) -> tuple[str, str]:
    """Return who that is and why it listens; an empty owner and the command: it should not."""
    for pattern, owner, reason in REASONS:
        if re.search(pattern, command):
            return owner, reason
    return "", " ".join(command.split())[:200]


def table(doors: Iterable[Door]) -> str:
    """Return a table for people: one line for each PC, owner and address."""
    rows = [("PC", "socket", "owner", "reason")]
    rows += sorted(
        {(d.where, f"{d.protocol} {d.address}", d.owner or "UNEXPLAINED", d.reason) for d in doors}
    )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )

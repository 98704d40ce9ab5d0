"""Signs of life of a rank as the kernel reports them: states, CPU time, bytes read and written.

They need no thread in the rank, so a process that is stopped, frozen or stuck cannot hide it. A
slow disk and a busy CPU are work: bytes trickle in, or a thread is ready to run and gets no core.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

STOPPED = ("T", "t")
"""States of a process that was stopped by a signal, or is held by a debugger."""
FROZEN = "F"
"""State of a process whose control group is frozen; the kernel shows such a process as D or S."""
HALTED = (*STOPPED, FROZEN)
WORK_SHARE = 0.03
"""CPU use from which a rank counts as working, as a share of one core; its threads that only watch
use less."""
WORK_BYTES_PER_S = 32 << 10
"""Bytes read or written per second from which a rank counts as working; polls of a store are
less."""
_CAUSES = {
    "T": " The process was stopped (SIGSTOP).",
    "t": " The process is held by a debugger.",
    FROZEN: " The process is frozen: its control group was paused.",
    "D": " The process is stuck in the kernel: the disk or the GPU driver does not answer.",
}
CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Resources used so far by a rank and the processes that it started."""

    cpu_s: float
    io_bytes: int = 0
    """Bytes passed to and from files, pipes and sockets, and pages read from mapped files."""
    disk_bytes: int = 0
    """Bytes that all disks of this PC have read and written."""
    states: frozenset[str] = frozenset()
    """States of the rank's threads."""


def shows_work(before: Usage, now: Usage, passed_s: float) -> bool:
    """Return whether a rank worked between two measurements `passed_s` seconds apart.

    >>> idle = Usage(cpu_s=10.0, io_bytes=5000, states=frozenset("S"))
    >>> [shows_work(idle, Usage(cpu_s=cpu_s, io_bytes=done, states=frozenset(states)), 2.0)
    ...  for cpu_s, done, states in ((10.01, 5400, "S"), (10.2, 5400, "S"), (10.0, 90_000, "S"),
    ...                              (10.0, 5000, "RS"), (10.0, 5000, "DS"))]
    [False, True, True, True, False]
    """
    if "R" in now.states:
        return True  # ready to run, even if other programs have all cores
    used_s, moved = now.cpu_s - before.cpu_s, now.io_bytes - before.io_bytes
    if used_s < 0 or moved < 0:
        return True  # a sum falls when a process that the rank started ends
    enough = WORK_BYTES_PER_S * passed_s
    # The kernel counts written bytes when they are buffered, not while a sync waits for the disk.
    # Then other threads sleep as usual; if all are in this state, the process is frozen or stuck.
    can_sync = "D" in now.states and len(now.states) > 1
    syncs = can_sync and now.disk_bytes - before.disk_bytes >= enough
    return used_s >= WORK_SHARE * passed_s or moved >= enough or syncs


def read_usage(leader: int) -> Usage:
    """Return what a rank, the processes of its session and their children have used."""
    rows: dict[int, tuple[int, int, float, int]] = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = _read_stat(_PROC / name)
                ticks = int(fields[11]) + int(fields[12])  # utime and stime
                row = (int(fields[1]), int(fields[3]), ticks / os.sysconf("SC_CLK_TCK"))
                rows[int(name)] = (*row, int(fields[9]))  # major page faults
    family = {pid for pid, row in rows.items() if pid == leader or row[1] == leader}
    # A compiler may have a session of its own; parents have smaller numbers, except after a wrap.
    for pid in sorted(rows):
        if rows[pid][0] in family:
            family.add(pid)
    return Usage(
        cpu_s=sum(rows[pid][2] for pid in family),
        io_bytes=sum(_read_io_bytes(pid) + rows[pid][3] * os.sysconf("SC_PAGESIZE")
                     for pid in family),
        disk_bytes=_read_disk_bytes(),
        states=_read_thread_states(leader),
    )  # fmt: skip


def read_process_state(pid: int) -> str:
    """Return the state letter of a process, `F` if it is frozen, or an empty string if it is
    gone.
    """
    try:
        state = _read_stat(_PROC / str(pid))[0].decode("ascii")
    except (OSError, IndexError):
        return ""
    return FROZEN if state in ("D", "S") and is_frozen(pid) else state


def describe_state(state: str, usage: Usage | None = None) -> str:
    """Return a sentence about a process without signs of work, after a space; empty if unknown."""
    if state not in HALTED and usage is not None and "D" in usage.states:
        state = "D"  # one of its threads is the one that the disk keeps waiting
    return _CAUSES.get(state, "" if usage is None else " It neither computes nor reads or writes.")


def is_frozen(pid: int) -> bool:
    """Return whether the control group of a process, or a group above it, is frozen."""
    for line in _read(_PROC / str(pid) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        folder = path.lstrip("/")
        if not controllers:  # version 2, alone or together with version 1
            for root in (CGROUPS, CGROUPS / "unified"):
                if "frozen 1" in _read(root / folder / "cgroup.events").splitlines():
                    return True
        elif "freezer" in controllers.split(","):
            state = _read(CGROUPS / "freezer" / folder / "freezer.state")
            if state.strip() == "FROZEN":
                return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_stat(folder: Path) -> list[bytes]:
    # The name in parentheses may itself contain spaces and parentheses.
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()


def _read_thread_states(pid: int) -> frozenset[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / str(pid) / "task"):
            with contextlib.suppress(OSError, IndexError):  # that thread has ended
                found.add(_read_stat(_PROC / str(pid) / "task" / name)[0].decode("ascii"))
    return frozenset(found)


def _read_io_bytes(pid: int) -> int:
    counts = _read_counts(_PROC / str(pid) / "io", ":")
    return sum(counts.get(name, 0) for name in ("rchar", "wchar", "read_bytes"))


def _read_disk_bytes() -> int:
    counts = _read_counts(_PROC / "vmstat", " ")
    return 1024 * (counts.get("pgpgin", 0) + counts.get("pgpgout", 0))


def _read_counts(path: Path, mark: str) -> dict[str, int]:
    rows = (line.partition(mark) for line in _read(path).splitlines())
    return {name: int(number) for name, _, number in rows if number.strip().isdigit()}

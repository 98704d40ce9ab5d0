"""Read CPU time and memory of processes from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def processes_with(variable: str, value: str) -> Iterator[int]:
    """Yield the pids whose environment has `variable` set to `value`."""
    needle = f"{variable}={value}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue  # it ended, or is not ours to read


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def cpu_s(pid: int) -> float:
    """Return the time on a core of all living threads, to the nanosecond (schedstat)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory_bytes(pid: int) -> int:
    """Return the resident set; pages shared with other processes count in full."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

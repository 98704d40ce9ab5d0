"""Read from the kernel whether it killed a process because memory ran out.

SIGKILL has no sender. What the kernel does for lack of memory it writes to its log, with the
process id, and counts for the control group and for the PC; it raises both before it sends the
signal. So what was counted since this object was made tells its kills from those by people,
programs such as systemd-oomd, and other tools.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MAX_RECORDS = 10_000
_KILLED = re.compile(r"Killed process (\d+) ")
_RECORD_BYTES = 8192


class MemoryKills:
    """Kills for lack of memory since this object was made."""

    def __init__(self) -> None:
        self._counters = [path for path in _find_counters() if _read_count(path) is not None]
        self._before = {path: _read_count(path) for path in self._counters}
        self._of_pc = _read_count(Path("/proc/vmstat"))
        # Lines of the kernel's log by the process that was killed: each line is read only once.
        self._lines: dict[int, str] = {}
        self._log: int | None = None
        with contextlib.suppress(OSError):  # most users may not read it
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)  # only what comes from now on

    def explain(self, pid: int) -> str:
        """Return who killed this process with SIGKILL, as far as the kernel tells."""
        for line in self._read_log():
            if found := _KILLED.search(line):
                self._lines[int(found[1])] = line.strip()
        if pid in self._lines:
            return f"the kernel killed it because memory ran out: {self._lines[pid]}"
        if any(_read_count(path) != self._before[path] for path in self._counters):
            return "the kernel killed it because the memory of its control group ran out"
        count = _read_count(Path("/proc/vmstat"))
        if count is None or self._of_pc is None:
            return "killed; whether memory ran out cannot be read on this node"
        if count != self._of_pc:
            return "the kernel killed a process then because the memory of this PC ran out"
        return "not by the kernel for lack of memory: a person or another program killed it"

    def _read_log(self) -> list[str]:
        lines: list[str] = []
        while self._log is not None and len(lines) < MAX_RECORDS:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                break
            if not record:
                break
            lines.append(record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0])
        return lines


def _find_counters() -> list[Path]:
    """Return the files that count the kills in the control group of this process."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found.append(CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _read_count(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None

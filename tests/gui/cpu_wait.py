"""What a busy PC takes from a thread, so that tests and benchmarks can leave it out of a time.

The core of a virtual machine may be away, too, when other machines of its host have it ("steal" of
proc_stat(5)). That counts as long as a thread stays on one core, so that another core's loss
excuses nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple


class CpuWait:
    """Measures how long this thread is ready to run and has no core, from now on."""

    def __init__(self) -> None:
        self._began = _read_thread(threading.get_native_id(), _read_stolen())

    def seconds(self) -> float:
        """Return how long it was until now."""
        return _read_thread(threading.get_native_id(), _read_stolen()).since(self._began)


class TurnTime:
    """Measures how long this thread is not free, from now on, whatever other processes do.

    Two things are left out: its own waiting for a core, and of its sleep as much as another thread
    of this process waits for one, since that may be the one that holds Python's lock. Only the
    thread that waits longest counts, and what this thread computes is never excused by another.
    """

    def __init__(self) -> None:
        self._threads = _read_threads()
        self._began_s, self._ran_s = time.perf_counter(), time.thread_time()

    def seconds(self) -> float:
        """Return how long it was until now."""
        took_s, ran_s = time.perf_counter() - self._began_s, time.thread_time() - self._ran_s
        waits = {
            thread: now.since(self._threads.get(thread, now))
            for thread, now in _read_threads().items()
        }
        own_s = waits.pop(threading.get_native_id())
        slept_s = max(0.0, took_s - ran_s - own_s)
        return max(0.0, took_s - own_s - min(slept_s, max(waits.values(), default=0.0)))


class _Thread(NamedTuple):
    core: int
    waited_s: float
    stolen_s: float
    """Of its core, since the PC started."""

    def since(self, began: _Thread) -> float:
        stolen_s = self.stolen_s - began.stolen_s if self.core == began.core else 0.0
        return self.waited_s - began.waited_s + stolen_s


def _read_threads() -> dict[int, _Thread]:
    stolen, threads = _read_stolen(), {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it ended
            threads[thread] = _read_thread(thread, stolen)
    return threads


def _read_thread(thread: int, stolen: dict[int, float]) -> _Thread:
    folder = Path(f"/proc/self/task/{thread}")
    core = int((folder / "stat").read_text().rpartition(")")[2].split()[36])
    waited_s = int((folder / "schedstat").read_text().split()[1]) / 1e9
    return _Thread(core, waited_s, stolen[core])


def _read_stolen() -> dict[int, float]:
    """Return the seconds for which each core was away."""
    cores = {}
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            cores[int(name[3:])] = int(ticks[7]) / os.sysconf("SC_CLK_TCK")
    return cores

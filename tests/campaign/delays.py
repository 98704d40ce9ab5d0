"""How long the processes that notice and heal a fault waited for a core, while others used it.

The kernel counts for each thread how long it was ready to run and did not (`/proc/*/schedstat`).
On a quiet PC that is next to nothing; a PC with more work than cores delays each link of the chain
from the rank's supervisor to the keeper, and what comes late by that is late by the PC.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

EVERY_S = 0.5
"""Time between two looks, in seconds."""


class Delays:
    """A thread that adds up what the processes of the chain waited for a core, in each interval.

    A fault is noticed by one process after the other, so that the sum of their waits bounds what
    the chain was delayed by; and so does the interval itself.
    """

    def __init__(self, find_pids: Callable[[], Iterable[int]]) -> None:
        """Begin to measure.

        Args:
            find_pids: returns the processes of the chain; called in the thread at each look.
        """
        self._find_pids = find_pids
        self._sums: list[tuple[float, float]] = [(time.time(), 0.0)]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def between(self, begin_s: float, end_s: float) -> float:
        """Return the delay between two times since the epoch, in seconds."""
        sums = tuple(self._sums)
        return max(_interpolate(sums, end_s) - _interpolate(sums, begin_s), 0.0)

    def _measure(self) -> None:
        before = self._read()
        while not self._is_over.wait(EVERY_S):
            now, now_s = self._read(), time.time()
            began_s, total_s = self._sums[-1]
            waited_s = min(add_waits(before, now), now_s - began_s)
            self._sums.append((now_s, total_s + waited_s))
            before = now

    def _read(self) -> dict[int, float]:
        return {
            pid: waited for pid in self._find_pids() if (waited := read_wait_s(pid)) is not None
        }


def add_waits(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Return what all processes waited between two looks; a new one began at 0.

    >>> add_waits({1: 5.0, 2: 1.0}, {1: 5.25, 2: 1.5, 3: 0.125})
    0.875
    """
    return sum(waited - before.get(pid, 0.0) for pid, waited in now.items())


def read_wait_s(pid: int) -> float | None:
    """Return how long a process's most delayed thread has waited for a core, in seconds.

    None: the process has ended.
    """
    waits = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # that thread has ended
                waits.append(int((thread / "schedstat").read_text().split()[1]) * 1e-9)
    return max(waits, default=None)


def _interpolate(sums: tuple[tuple[float, float], ...], at_s: float) -> float:
    """Return the sum at a time, growing evenly between two looks."""
    earlier = [one for one in sums if one[0] <= at_s]
    if not earlier:
        return 0.0
    (begin_s, low), later = earlier[-1], sums[len(earlier) :]
    if not later:
        return low
    end_s, high = later[0]
    return low + (high - low) * (at_s - begin_s) / (end_s - begin_s)

"""Kind of this process: Python with the installed packages, or the desktop bundle.

The bundle has no interpreter for other programs, so a node on this PC cannot train with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time


def is_bundle() -> bool:
    """Return whether this process is the desktop bundle."""
    return bool(getattr(sys, "frozen", False))


def own_pythons() -> tuple[str, ...]:
    """Return the interpreter of this process if a node on this PC may use it, else nothing."""
    return () if is_bundle() else (sys.executable,)


def started_s() -> float:
    """Return the time at which this process was started, in seconds since the epoch.

    Loading Python takes part of a second, in which the user may act in another process. Where the
    system does not tell, it is now.
    """
    now_s = time.time()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open("/proc/self/stat", "rb") as file:
                ticks = int(file.read().rpartition(b")")[2].split()[19])
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
            return now_s - max(age_s, 0.0)
    return now_s

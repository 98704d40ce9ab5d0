"""Detect that this PC slept, or that its clock was set.

Three clocks distinguish these: the monotonic clock pauses during sleep, the boot clock does not,
and only the wall clock can be set. All timers of the supervisor use the monotonic clock, so neither
makes a rank appear to hang; but ranks on other nodes do not wait for a PC that sleeps for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SLEPT_S = 2.0
"""Minimum pause of the monotonic clock that counts as sleep, in seconds."""
STEPPED_S = 2.0
"""Minimum step of the wall clock that is reported, in seconds; NTP slews smaller offsets."""
RECENT_S = 60.0
"""Time after a sleep during which lost ranks are attributed to it, in seconds."""
_READ_S = 0.1
"""Maximum time between the first and the last of the three readings, in seconds."""


@dataclass(frozen=True)
class Clocks:
    """Readings of all clocks at one moment, in seconds."""

    monotonic_s: float
    boot_s: float
    wall_s: float


@dataclass(frozen=True)
class Sleep:
    began_s: float
    ended_s: float
    """Times on the wall clock, in seconds since 1970."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s

    def describe(self, node: str) -> str:
        """Return a sentence for the user."""
        began, ended = (
            time.strftime("%H:%M:%S", time.localtime(at_s)) for at_s in (self.began_s, self.ended_s)
        )
        return f"Node {node} slept from {began} to {ended} (suspend)."


def read_clocks() -> Clocks:
    while True:
        began_s = time.monotonic()
        clocks = Clocks(began_s, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
        # Read again if this process was paused between the readings.
        if time.monotonic() - began_s < _READ_S:
            return clocks


class ClockWatch:
    """Comparison of the clocks with those of the last call."""

    def __init__(self, read: Callable[[], Clocks] = read_clocks) -> None:
        self._read = read
        self._last = read()
        self._sleep: Sleep | None = None
        self._woke_s = 0.0

    def look(self) -> tuple[Sleep | None, float]:
        """Return the sleep since the last call, and the step of the wall clock, in seconds."""
        last, now = self._last, self._read()
        self._last = now
        passed_s = now.boot_s - last.boot_s
        slept_s = passed_s - (now.monotonic_s - last.monotonic_s)
        set_s = now.wall_s - last.wall_s - passed_s
        # Computed back from the wake-up, because this process did not run when the sleep began.
        sleep = Sleep(now.wall_s - slept_s, now.wall_s) if slept_s >= SLEPT_S else None
        if sleep is not None:
            self._sleep, self._woke_s = sleep, now.monotonic_s
        return sleep, set_s if abs(set_s) >= STEPPED_S else 0.0

    @property
    def recent_sleep(self) -> Sleep | None:
        """Sleep that ended within the last `RECENT_S`, or None."""
        is_recent = self._last.monotonic_s - self._woke_s <= RECENT_S
        return self._sleep if is_recent else None

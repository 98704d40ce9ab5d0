"""Judge by its samples whether a GPU is too hot to train on, and what to do about it.

Pure. Warm cards slow down a little on their own, as they are built to, so only two cases count:
heat holds the clock down for a minute, which costs speed; or the card has reached the temperature
at which its hardware halves the clock, which wears it and makes every other rank wait.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from agents.contract.node import GpuSample
from agents.contract.run import HeatRule
from agents.telemetry.gpu import TOO_HOT

WINDOW_S = 60.0
"""Time over which heat has to hold the clock down, in seconds."""
MIN_SHARE = 0.5
"""Share of the samples of that time that have to show it."""
COOLER_CELSIUS = 10.0
"""How much cooler than at its start a pause ends, in degrees Celsius."""
HARDWARE_SAMPLES = 3
"""Number of samples in a row that show the hardware's own slowdown before it counts."""
WARN_AGAIN_S = 3600.0
"""Least time between two warnings, in seconds."""

MIN_SLOWDOWN_CELSIUS = 60.0
"""Least slowdown temperature that is believed: no card is built for less."""

HeatAct = Literal["", "warn", "pause", "go_on", "limit"]
"""`pause` lasts until `go_on`; `limit` asks for a lower power limit; empty: nothing changes."""


class HeatJudge:
    """Follows one GPU.

    Args:
        rule: what its owner wants where heat holds the clock down.
        slowdown_celsius: temperature at which its hardware slows it down, in degrees Celsius; None:
            not known.
    """

    def __init__(self, rule: HeatRule, slowdown_celsius: float | None) -> None:
        self.rule = rule
        is_known = slowdown_celsius is not None and slowdown_celsius >= MIN_SLOWDOWN_CELSIUS
        self._slowdown_celsius = slowdown_celsius if is_known else None
        # Times in seconds, and whether heat held the clock down.
        self._seen: deque[tuple[float, bool]] = deque()
        self._num_hardware = 0
        self._warned_s: float | None = None
        self.until_celsius: float | None = None
        """Temperature at which the present pause ends, in degrees Celsius; None: no pause."""

    def judge(self, sample: GpuSample, now_s: float) -> HeatAct:
        """Take the next sample, and return what has to be done.

        Args:
            sample: of this GPU.
            now_s: time on the monotonic clock, in seconds.
        """
        celsius = sample.temperature_celsius
        if self.until_celsius is not None:
            # Nobody can wait for a sensor that is gone.
            if celsius is not None and celsius > self.until_celsius:
                return ""
            self.until_celsius = None
            self._seen.clear()
            return "go_on"
        if celsius is None:
            return ""
        reasons = sample.throttle or ()
        self._num_hardware = self._num_hardware + 1 if TOO_HOT[1] in reasons else 0
        is_at_limit = self._slowdown_celsius is not None and celsius >= self._slowdown_celsius
        if is_at_limit or self._num_hardware >= HARDWARE_SAMPLES:
            return self._pause(celsius)
        if not self._is_held_down(any(reason in TOO_HOT for reason in reasons), now_s):
            return ""
        self._seen.clear()  # the next act needs another minute
        if self.rule == "wait":
            return self._pause(celsius)
        return "limit" if self.rule == "limit" else self._warn(now_s)

    def _is_held_down(self, is_hot: bool, now_s: float) -> bool:
        self._seen.append((now_s, is_hot))
        if now_s - self._seen[0][0] < WINDOW_S:
            return False
        num_hot = sum(hot for _, hot in self._seen)
        is_long = num_hot >= MIN_SHARE * len(self._seen)
        while now_s - self._seen[0][0] >= WINDOW_S:
            self._seen.popleft()
        return is_long

    def _pause(self, celsius: float) -> HeatAct:
        self._num_hardware = 0
        self.until_celsius = celsius - COOLER_CELSIUS
        return "pause"

    def _warn(self, now_s: float) -> HeatAct:
        if self._warned_s is not None and now_s - self._warned_s < WARN_AGAIN_S:
            return ""
        self._warned_s = now_s
        return "warn"

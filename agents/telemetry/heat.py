"""Decide from a GPU's samples whether it is too hot to train on, and how to react. Pure.

All cards lower their clocks slightly when warm, by design, so only two cases count: heat throttles
the clock for a minute, which costs speed; or the card reaches the temperature at which its hardware
halves the clock, which wears it and makes all other ranks wait.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from agents.contract.node import GpuSample
from agents.contract.run import HeatRule
from agents.telemetry.gpu import TOO_HOT

WINDOW_S = 60.0
"""Time for which heat must throttle the clock before a reaction, in seconds."""
MIN_SHARE = 0.5
"""Minimum share of throttled samples in that time."""
COOLER_CELSIUS = 10.0
"""Temperature drop that ends a pause, in degrees Celsius."""
HARDWARE_SAMPLES = 3
"""Number of consecutive samples with the hardware's own slowdown before a reaction."""
WARN_AGAIN_S = 3600.0
"""Minimum time between two warnings, in seconds."""

MIN_SLOWDOWN_CELSIUS = 60.0
"""Minimum plausible slowdown temperature, in degrees Celsius; no card is built for less."""

HeatAct = Literal["", "warn", "pause", "go_on", "limit"]
"""Reaction: `pause` lasts until `go_on`; `limit` asks for a lower power limit; empty if none."""


class HeatJudge:
    """Judge of one GPU's temperature.

    Args:
        rule: the user's choice for a clock throttled by heat.
        slowdown_celsius: temperature at which the hardware slows the card down, in degrees Celsius;
            None if unknown.
    """

    def __init__(self, rule: HeatRule, slowdown_celsius: float | None) -> None:
        self.rule = rule
        # Without a plausible limit, only the hardware's own slowdown counts.
        is_known = slowdown_celsius is not None and slowdown_celsius >= MIN_SLOWDOWN_CELSIUS
        self._slowdown_celsius = slowdown_celsius if is_known else None
        # Time in seconds and whether heat throttled the clock, per sample.
        self._seen: deque[tuple[float, bool]] = deque()
        self._num_hardware = 0
        self._warned_s: float | None = None
        self.until_celsius: float | None = None
        """Temperature at which the current pause ends, in degrees Celsius; None without a pause."""

    def judge(self, sample: GpuSample, now_s: float) -> HeatAct:
        """Process the next sample and return the reaction.

        Args:
            sample: sample of this GPU.
            now_s: time on the monotonic clock, in seconds.
        """
        celsius = sample.temperature_celsius
        if self.until_celsius is not None:
            # A sensor that fails during a pause ends it, or the pause would never end.
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
        self._seen.clear()  # the next reaction needs another minute
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
        # Well below the start, or the pause would end at once and begin again.
        self.until_celsius = celsius - COOLER_CELSIUS
        return "pause"

    def _warn(self, now_s: float) -> HeatAct:
        if self._warned_s is not None and now_s - self._warned_s < WARN_AGAIN_S:
            return ""
        self._warned_s = now_s
        return "warn"

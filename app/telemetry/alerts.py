"""Alerts on devices, nodes and runs: hot, throttled, nearly full, stalled, loss not a number.

Pure functions from figures to sentences. An alert is raised at its limit and cleared somewhat below
it, so that it does not flicker near the limit; for that the caller passes the active kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from app.events import RunSnapshot
from app.text import show_celsius, show_duration, show_share

AlertKind = Literal["hot", "throttled", "memory_full", "disk_full", "stalled", "loss_not_finite"]

GPU_HOT_CELSIUS = 85.0
"""Temperature of a hot GPU, in degrees Celsius; GeForce cards throttle from slightly below 90."""
CPU_HOT_CELSIUS = 95.0
"""Temperature of a hot CPU, in degrees Celsius; desktop CPUs throttle at 95 to 105."""
# Distance below its limit at which an alert is cleared.
HOT_RELEASE_CELSIUS = 5.0
SHARE_RELEASE = 0.02
MEMORY_FULL_SHARE = 0.97
DISK_FULL_SHARE = 0.95
SILENT_AFTER_S = 5.0
"""Time without a sample after which a node is silent, in seconds; samples come every second."""
NO_READINGS_AFTER_S = 10.0
"""Time without a live sample after which the figures of an answering node are old, in seconds."""
SPEED_HOLDS_S = 30.0
SPEED_STEPS = 5.0
"""Number of step times for which a rank's last speed stays valid, at least `SPEED_HOLDS_S`."""
STALL_FLOOR_S = 60.0
STALL_STEPS = 10.0
"""Number of step times without a new step that count as a stall, at least `STALL_FLOOR_S`."""

_WAY_OUT = "start a new run like this one with a lower learning rate"
# Throttle reasons of NVML that are no problem; it reports `gpu idle` for any idle card.
_HARMLESS_THROTTLE = ("idle", "application clocks", "display")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    kind: AlertKind
    severity: Literal["warning", "error"]
    text: str
    """Phrase to be put after the name of the device or node."""


def _over(value: float | None, limit: float, release: float, active: bool) -> bool:
    # An unknown value clears the alert, since there is no evidence for it.
    if value is None or not math.isfinite(value):
        return False
    return value >= (limit - release if active else limit)


def share_of(used: float | None, total: float | None) -> float | None:
    """Return `used / total`, or None if either is not known."""
    if used is None or not total:
        return None
    return used / total


def check_heat(
    celsius: float | None, *, is_gpu: bool, active: frozenset[AlertKind] = frozenset()
) -> Alert | None:
    """Return an alert if a device is hot."""
    limit = GPU_HOT_CELSIUS if is_gpu else CPU_HOT_CELSIUS
    if not _over(celsius, limit, HOT_RELEASE_CELSIUS, "hot" in active):
        return None
    return Alert(kind="hot", severity="warning", text=f"hot: {show_celsius(celsius)}")


def check_throttle(reasons: tuple[str, ...] | None) -> Alert | None:
    """Return an alert if the clock is throttled for a reason that costs speed."""
    costly = [
        reason
        for reason in reasons or ()
        if not any(word in reason.lower() for word in _HARMLESS_THROTTLE)
    ]
    if not costly:
        return None
    return Alert(kind="throttled", severity="warning", text="throttled: " + ", ".join(costly))


def check_memory(
    used: float | None, total: float | None, active: frozenset[AlertKind] = frozenset()
) -> Alert | None:
    """Return an alert if the memory of a device is nearly full."""
    share = share_of(used, total)
    if not _over(share, MEMORY_FULL_SHARE, SHARE_RELEASE, "memory_full" in active):
        return None
    return Alert(
        kind="memory_full", severity="warning", text=f"memory nearly full: {show_share(share)}"
    )


def check_disk(
    used: float | None, total: float | None, active: frozenset[AlertKind] = frozenset()
) -> Alert | None:
    """Return an alert if the disk with the agent's home is nearly full."""
    share = share_of(used, total)
    if not _over(share, DISK_FULL_SHARE, SHARE_RELEASE, "disk_full" in active):
        return None
    return Alert(
        kind="disk_full", severity="warning", text=f"disk nearly full: {show_share(share)}"
    )


def check_run(run: RunSnapshot, last_step_age_s: float | None) -> tuple[Alert, ...]:
    """Return the alerts of an active run."""
    found = []
    if run.loss is not None and not math.isfinite(run.loss):
        found.append(
            Alert(
                kind="loss_not_finite",
                severity="error",
                text=f"the loss is no longer a number: {_WAY_OUT}",
            )
        )
    steps = [rank.step_s for rank in run.ranks if rank.step_s is not None]
    # The slowest rank sets the pace, as all ranks wait for it.
    limit = max(STALL_FLOOR_S, STALL_STEPS * max(steps, default=0.0))
    # Loading, compiling and saving may take a long time without a step.
    training = run.state == "running" and run.phase == "training"
    if training and last_step_age_s is not None and last_step_age_s > limit:
        text = f"no step for {show_duration(last_step_age_s)}"
        found.append(Alert(kind="stalled", severity="error", text=text))
    return tuple(found)

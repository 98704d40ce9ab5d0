"""Alerts on devices, nodes and runs: hot, throttled, nearly full, stalled, loss not a number.

Pure: figures in, sentences out. An alert with a limit is raised at the limit and cleared some way
below it, so that a value close to the limit does not flicker; the caller passes the active kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from app.events import RunSnapshot
from app.text import show_celsius, show_duration, show_share

AlertKind = Literal["hot", "throttled", "memory_full", "disk_full", "stalled", "loss_not_finite"]

GPU_HOT_CELSIUS = 85.0
"""Temperature of a hot GPU; GeForce cards begin to throttle a little below 90."""
CPU_HOT_CELSIUS = 95.0
"""Temperature of a hot CPU; desktop CPUs throttle at 95 to 105."""
# How far below its limit a value has to fall before its alert is cleared.
HOT_RELEASE_CELSIUS = 5.0
SHARE_RELEASE = 0.02
MEMORY_FULL_SHARE = 0.97
DISK_FULL_SHARE = 0.95
SILENT_AFTER_S = 5.0
"""Time without a sample after which a node counts as silent; samples come every second."""
NO_READINGS_AFTER_S = 10.0
"""Time without a live sample of a node that answers, in seconds, after which its figures are old.
"""
SPEED_HOLDS_S = 30.0
SPEED_STEPS = 5.0
"""Step times for which the speed of a rank's newest step still holds, but at least
`SPEED_HOLDS_S`."""
STALL_FLOOR_S = 60.0
STALL_STEPS = 10.0
"""Step times without a new step that count as a stall, but at least `STALL_FLOOR_S`."""

_WAY_OUT = "start a new run like this one with a lower learning rate"
# NVML's throttle reasons that are no problem: it reports `gpu idle` whenever a card is idle.
_HARMLESS_THROTTLE = ("idle", "application clocks", "display")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    kind: AlertKind
    severity: Literal["warning", "error"]
    text: str
    """Phrase that follows the name of the device or node."""


def _over(value: float | None, limit: float, release: float, active: bool) -> bool:
    # An unknown value clears the alert: nothing shows that it still holds.
    if value is None or not math.isfinite(value):
        return False
    return value >= (limit - release if active else limit)


def share_of(used: float | None, total: float | None) -> float | None:
    """Return `used / total`, or None when either is not known."""
    if used is None or not total:
        return None
    return used / total


def check_heat(
    celsius: float | None, *, is_gpu: bool, active: frozenset[AlertKind] = frozenset()
) -> Alert | None:
    """Return an alert when a device is hot."""
    limit = GPU_HOT_CELSIUS if is_gpu else CPU_HOT_CELSIUS
    if not _over(celsius, limit, HOT_RELEASE_CELSIUS, "hot" in active):
        return None
    return Alert(kind="hot", severity="warning", text=f"hot: {show_celsius(celsius)}")


def check_throttle(reasons: tuple[str, ...] | None) -> Alert | None:
    """Return an alert when the clock is throttled for a reason that costs speed."""
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
    """Return an alert when the memory of a device is nearly full."""
    share = share_of(used, total)
    if not _over(share, MEMORY_FULL_SHARE, SHARE_RELEASE, "memory_full" in active):
        return None
    return Alert(
        kind="memory_full", severity="warning", text=f"memory nearly full: {show_share(share)}"
    )


def check_disk(
    used: float | None, total: float | None, active: frozenset[AlertKind] = frozenset()
) -> Alert | None:
    """Return an alert when the disk with the agent's home is nearly full."""
    share = share_of(used, total)
    if not _over(share, DISK_FULL_SHARE, SHARE_RELEASE, "disk_full" in active):
        return None
    return Alert(
        kind="disk_full", severity="warning", text=f"disk nearly full: {show_share(share)}"
    )


def check_run(run: RunSnapshot, last_step_age_s: float | None) -> tuple[Alert, ...]:
    """Return the alerts of a run that is under way."""
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
    # Loading, compiling and saving may take long without a step.
    training = run.state == "running" and run.phase == "training"
    if training and last_step_age_s is not None and last_step_age_s > limit:
        text = f"no step for {show_duration(last_step_age_s)}"
        found.append(Alert(kind="stalled", severity="error", text=text))
    return tuple(found)

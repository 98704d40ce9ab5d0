"""Desktop notifications: a run that finished or failed, a hot device, a nearly full disk.

Pure functions from snapshots to sentences. Only changes of a run are reported, not its state when
Rackless starts. A device close to its limit is reported at most every `REPEAT_S`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from app.events import ACTIVE_STATES, RunSnapshot, RunState
from app.telemetry.state import Tone
from app.telemetry.stream import Device
from app.text import show_duration, show_loss, show_moment

NoticeKind = Literal["finished", "failed", "interrupted", "hot", "disk_full"]
# Minimum time between two notifications about the same hot device.
REPEAT_S = 600.0
OLD_AFTER_S = 120.0
"""Age from which a run's end is reported with its time, in seconds: Rackless was closed then."""

SETTING_OF: dict[NoticeKind, str] = {
    "finished": "notify_finished",
    "failed": "notify_problems",
    "interrupted": "notify_problems",
    "hot": "notify_hot",
    "disk_full": "notify_problems",
}
"""Setting that switches each kind on or off."""

_KINDS: dict[RunState, tuple[NoticeKind, Tone, str]] = {
    "done": ("finished", "good", "has finished"),
    "failed": ("failed", "error", "has failed"),
    "interrupted": ("interrupted", "warning", "was interrupted"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    kind: NoticeKind
    tone: Tone
    title: str
    text: str
    run_id: str = ""
    """Id of the run to open; empty for a notice about a node."""
    node: str = ""


class Notices:
    """Turns changes into notices. Not thread-safe: use it on one thread."""

    def __init__(self) -> None:
        self._states: dict[str, RunState] = {}
        self._hot_s: dict[object, float] = {}
        self._full_disks: set[str] = set()

    def take_run(self, run: RunSnapshot, now_s: float) -> Notice | None:
        """Return the notice for a run's new snapshot, or None."""
        before = self._states.get(run.run_id)
        self._states[run.run_id] = run.state
        # A run first seen in its end state ended before Rackless started, so it is not news.
        if before not in ACTIVE_STATES or run.state not in _KINDS:
            return None
        kind, tone, words = _KINDS[run.state]
        return Notice(
            kind=kind,
            tone=tone,
            title=f"{run.name} {words}",
            text=_describe_end(run, now_s),
            run_id=run.run_id,
        )

    def forget_run(self, run_id: str) -> None:
        self._states.pop(run_id, None)

    def take_devices(self, devices: Iterable[Device], now_s: float) -> tuple[Notice, ...]:
        """Return the notices for devices with new readings."""
        found = []
        for device in devices:
            found += [self._take_heat(device, now_s), self._take_disk(device)]
        return tuple(notice for notice in found if notice is not None)

    def _take_heat(self, device: Device, now_s: float) -> Notice | None:
        hot = next((alert for alert in device.alerts if alert.kind == "hot"), None)
        last_s = self._hot_s.get(device.key)
        if hot is None or (last_s is not None and now_s - last_s < REPEAT_S):
            return None
        self._hot_s[device.key] = now_s
        work = f"It trains {device.run.name}. " if device.run is not None else ""
        return Notice(
            kind="hot",
            tone="warning",
            title=f"{device.reading.name} in {device.key.node} is {hot.text}",
            text=f"{work}Check its fans and the air flow. What runs do when heat slows a GPU "
            "down is one of the settings.",
            node=device.key.node,
        )

    def _take_disk(self, device: Device) -> Notice | None:
        # A disk stays full for days, so it is reported once until it has been freed.
        node = device.key.node
        full = next((alert for alert in device.node_alerts if alert.kind == "disk_full"), None)
        if full is None or node in self._full_disks:
            if full is None:
                self._full_disks.discard(node)
            return None
        self._full_disks.add(node)
        return Notice(
            kind="disk_full",
            tone="warning",
            title=f"{node}: {full.text}",
            text="Checkpoints cannot be saved once it is full. Delete old runs or other files.",
            node=node,
        )


def _describe_end(run: RunSnapshot, now_s: float) -> str:
    parts = []
    if run.state == "done":
        if run.first_loss is not None and run.loss is not None:
            parts.append(f"Loss {show_loss(run.first_loss)} to {show_loss(run.loss)}.")
        if run.started_s is not None and run.ended_s is not None:
            parts.append(f"It took {show_duration(run.ended_s - run.started_s)}.")
    else:
        parts.extend(part for part in (run.message, run.hint) if part)
    if run.ended_s is not None and now_s - run.ended_s > OLD_AFTER_S:
        parts.append(f"That was at {show_moment(run.ended_s, now_s)}.")
    return " ".join(parts)

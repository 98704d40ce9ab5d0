"""Describe the state of nodes, devices and runs in a few words, the same ones everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.events import ACTIVE_STATES, NodeSnapshot, RunSnapshot, RunState
from app.telemetry.alerts import SILENT_AFTER_S
from app.telemetry.stream import Device
from app.text import show_duration

Tone = Literal["good", "busy", "calm", "warning", "error"]
"""Tone of a state; a word and a glyph always accompany its colour."""

BUSY_UTILISATION = 0.1
"""Minimum utilisation of a device without a rank that counts as other work, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Status:
    tone: Tone
    text: str


def describe_node(node: NodeSnapshot, now_s: float) -> Status:
    """Return the state of a node; `now_s` is the master's wall clock."""
    if node.state == "online":
        return Status("good", "online")
    if node.state == "connecting":
        return Status("calm", "connecting")
    if node.state == "refused":
        return Status("error", "refused")
    if node.last_seen_s is None:
        return Status("error", "unreachable")
    return Status("error", f"unreachable for {show_duration(max(now_s - node.last_seen_s, 1.0))}")


def describe_device(device: Device, node: NodeSnapshot, now_s: float) -> Status:
    """Return the state of a device: a lost node first, then alerts, then its work."""
    if node.state != "online":
        return describe_node(node, now_s)
    if node.last_seen_s is not None and now_s - node.last_seen_s > SILENT_AFTER_S:
        return Status("warning", f"silent for {show_duration(now_s - node.last_seen_s)}")
    alerts = (*device.alerts, *device.node_alerts)
    if alerts:
        # False sorts before True: the first error wins, else the first warning.
        worst = min(alerts, key=lambda alert: alert.severity != "error")
        doing = f" \u00b7 {device.run.name}" if device.run is not None else ""
        return Status(worst.severity, worst.text + doing)
    return _describe_work(device)


def _describe_work(device: Device) -> Status:
    if device.run is not None and device.rank is not None:
        phase = device.rank.phase or device.run.phase or "starting"
        return Status("busy", f"{phase} {device.run.name} \u00b7 rank {device.rank.rank}")
    if device.reading.time_s is None:
        return Status("calm", "waiting for readings")
    if (device.reading.utilisation or 0.0) > BUSY_UTILISATION:
        return Status("calm", "busy with other work")
    return Status("calm", "idle")


_RUN_TONES: dict[RunState, Tone] = {
    "created": "calm",
    "launching": "busy",
    "running": "busy",
    "stopping": "busy",
    "stopped": "calm",
    "interrupted": "warning",
    "failed": "error",
    "done": "good",
}


def describe_run(state: RunState, phase: str | None = None) -> Status:
    """Return a run's state, with its phase while it is running but not training."""
    if state == "running" and phase not in (None, "training", "done"):
        return Status("busy", f"running, {phase}")
    return Status(_RUN_TONES[state], state)


def progress_share(run: RunSnapshot) -> float | None:
    """Return the progress of a run, 0 to 1."""
    if run.step is None or not run.total_steps:
        # A run that is starting has an empty bar; one that ended without a step has none.
        return 0.0 if run.state in ACTIVE_STATES else None
    return run.step / run.total_steps

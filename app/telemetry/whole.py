"""Summarize the whole cluster in one line, for the tray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.events import ACTIVE_STATES, NodeSnapshot, RunSnapshot
from app.telemetry.alerts import Alert
from app.telemetry.state import Tone, progress_share
from app.telemetry.stream import Device
from app.text import count_of, show_duration, show_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    tone: Tone
    """Tone: `calm` when idle, `busy` when running, `warning` or `error` for a problem."""
    share: float | None
    """Progress of the run that is furthest from its end, 0 to 1; None: no active run."""
    text: str


def describe_whole(
    nodes: Iterable[NodeSnapshot], runs: Iterable[RunSnapshot], devices: Iterable[Device]
) -> Whole:
    """Return the state of the cluster: problems come before work, work before idleness."""
    active = [run for run in runs if run.state in ACTIVE_STATES]
    share = min((progress_share(run) or 0.0 for run in active), default=None)
    doing = describe_work(active)
    lost = [node.name for node in nodes if node.state in ("unreachable", "refused")]
    # A PC that is off is a problem only if a run needs it.
    needed = [name for name in lost if any(name in run.nodes for run in active)]
    if needed:
        text = f"{needed[0]} cannot be reached; {doing}"
        return Whole(tone="error", share=share, text=text)
    # Alerts of a lost node are as old as its last sample.
    alerts = [found for d in devices if d.key.node not in lost for found in _list_alerts(d)]
    alerts.sort(key=lambda pair: pair[1].severity != "error")
    if alerts:
        subject, alert = alerts[0]
        return Whole(tone=alert.severity, share=share, text=f"{subject} {alert.text}")
    return Whole(tone="busy" if active else "calm", share=share, text=doing)


def _list_alerts(device: Device) -> list[tuple[str, Alert]]:
    """Return the alerts of a device and of its node, each with the name of its subject."""
    node = f"{device.key.node}:"
    return [
        *((f"{node} {device.reading.name}", alert) for alert in device.alerts),
        *((node, alert) for alert in device.node_alerts),
    ]


def describe_work(active: Sequence[RunSnapshot]) -> str:
    """Describe the active runs in a few words."""
    if not active:
        return "nothing runs"
    if len(active) == 1:
        return describe_progress(active[0])
    return f"{count_of(len(active), 'run')} keep training"


def describe_progress(run: RunSnapshot) -> str:
    """Describe the progress of a run, such as `poems 34 %, 1 h 40 min left`."""
    if run.state != "running":
        return f"{run.name} is {run.state}"
    left = f", {show_duration(run.remaining_s)} left" if run.remaining_s is not None else ""
    return f"{run.name} {show_share(progress_share(run))}{left}"

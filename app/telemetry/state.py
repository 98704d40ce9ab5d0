"""Describe the state of nodes, devices and runs in a few words, shared by all views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from app.events import ACTIVE_STATES, NodeSnapshot, RankProgress, RunSnapshot, RunState
from app.telemetry.alerts import NO_READINGS_AFTER_S, SILENT_AFTER_S, SPEED_HOLDS_S, SPEED_STEPS
from app.text import show_duration

if TYPE_CHECKING:
    from app.telemetry.stream import Device  # loads numpy, which a list of runs does not need

Tone = Literal["good", "busy", "calm", "warning", "error"]
"""Tone of a state; a word and a glyph always accompany its colour."""

BUSY_UTILISATION = 0.1
"""Utilization of a device from which other programs count as working on it, 0 to 1."""


SILENT_STATES = frozenset({"connecting", "unreachable", "refused", "silent", "removed"})
"""States of a rank whose node is silent, as set by `current_run`."""


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


def is_silent(node: NodeSnapshot | None, now_s: float) -> bool:
    """Return whether the known state of a node's work is outdated."""
    if node is None or node.state != "online":
        return True
    return node.last_seen_s is not None and now_s - node.last_seen_s > SILENT_AFTER_S


def is_current(device: Device, node: NodeSnapshot, now_s: float) -> bool:
    """Return whether a device's figures are current; old ones must not be shown as such."""
    return not is_silent(node, now_s) and not _lacks_readings(device, now_s)


def _lacks_readings(device: Device, now_s: float) -> bool:
    return device.arrived_s is not None and now_s - device.arrived_s > NO_READINGS_AFTER_S


def describe_device(device: Device, node: NodeSnapshot, now_s: float) -> Status:
    """Return the state of a device: a lost node first, then alerts, then its work."""
    if node.state != "online":
        return describe_node(node, now_s)
    if node.last_seen_s is not None and now_s - node.last_seen_s > SILENT_AFTER_S:
        return Status("warning", f"silent for {show_duration(now_s - node.last_seen_s)}")
    if device.arrived_s is not None and _lacks_readings(device, now_s):
        return Status("warning", f"no readings for {show_duration(now_s - device.arrived_s)}")
    alerts = (*device.alerts, *device.node_alerts)
    if alerts:
        # False sorts before True, so the first error wins, else the first warning.
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
    if device.reading.use is not None:
        return Status("busy", f"busy with {device.reading.use}")
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


def describe_run(state: RunState, phase: str | None = None, *, is_silent: bool = False) -> Status:
    """Return a run's state, with its phase if it is running but not training.

    `is_silent` marks a run with silent nodes.
    """
    if state == "running" and phase not in (None, "training", "done"):
        return Status("warning" if is_silent else "busy", f"running, {phase}")
    return Status(_RUN_TONES[state], state)


def current_run(run: RunSnapshot, nodes: Mapping[str, NodeSnapshot], now_s: float) -> RunSnapshot:
    """Return an active run without the figures of silent nodes.

    The ranks of such a node get its state, since the node's newer journal entries are not known.
    """
    if run.state not in ACTIVE_STATES:
        return run
    silent = [name for name in run.nodes if is_silent(nodes.get(name), now_s)]
    if not silent:
        return run
    ranks = tuple(_hide(r, nodes.get(r.node)) if r.node in silent else r for r in run.ranks)
    states = [describe_silence(nodes.get(name)) for name in silent]
    words = f"{silent[0]} {states[0]}"
    if len(silent) == len(run.nodes):
        words = states[0] if len(set(states)) == 1 else "no contact"
    shown = replace(run, ranks=ranks, phase=words, starting=None, silent_nodes=tuple(silent))
    # Each rank records the sums over all ranks, so one answering node that trains is enough.
    if not _stands_still(ranks, now_s):
        return shown
    return replace(shown, tokens_per_s=None, mfu=None, eta=None, remaining_s=None)


def describe_silence(node: NodeSnapshot | None) -> str:
    """Return the state of a silent node in one word."""
    if node is None:
        return "removed"
    return "silent" if node.state == "online" else node.state


def describe_rank(rank: RankProgress, now_s: float) -> str:
    """Return the state of a rank, with the time since its node's last answer if it is silent."""
    if rank.silent_since_s is None:
        return rank.state
    return f"silent for {show_duration(max(now_s - rank.silent_since_s, 1.0))}"


def _stands_still(ranks: Sequence[RankProgress], now_s: float) -> bool:
    """Return whether no answering rank has finished a step for a long time, or no rank answers."""
    here = [rank for rank in ranks if rank.state not in SILENT_STATES]
    done_s = max((rank.time_s for rank in here if rank.time_s is not None), default=None)
    if not here or done_s is None:
        return not here
    step_s = max((rank.step_s or 0.0 for rank in here), default=0.0)
    return now_s - done_s > max(SPEED_HOLDS_S, SPEED_STEPS * step_s)


def _hide(rank: RankProgress, node: NodeSnapshot | None) -> RankProgress:
    """Return a rank without measured figures; its node, device and share are planned ones."""
    return RankProgress(
        rank=rank.rank,
        node=rank.node,
        device=rank.device,
        state=describe_silence(node),
        silent_since_s=node.last_seen_s if node else None,
        share=rank.share,
    )


def progress_share(run: RunSnapshot) -> float | None:
    """Return the progress of a run, 0 to 1."""
    if run.step is None or not run.total_steps:
        # A starting run has an empty bar; a run that ended without a step has no bar.
        return 0.0 if run.state in ACTIVE_STATES else None
    return run.step / run.total_steps

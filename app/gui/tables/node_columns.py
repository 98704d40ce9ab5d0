"""Columns of the nodes, and of the results of a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.events import NodeSnapshot
from app.gui.tables.rows_model import Column, number_column, unknown_first
from app.telemetry.state import Status, Tone, describe_node
from app.text import DASH, count_of, short_card, show_bytes, show_duration

Clock = Callable[[], float]
ClockOffset = Callable[[str], float | None]
"""Seconds by which a node's clock is ahead of this PC's; None if unknown."""
CLOCK_TOLERANCE_S = 1.0
"""Maximum clock difference shown as being in sync, in seconds."""


def describe_hardware(node: NodeSnapshot) -> str:
    """Return a node's GPUs such as `2 x RTX 3090`, or its CPU if it has none."""
    if node.facts is None:
        return DASH
    if not node.facts.gpus and not node.facts.mig_gpus:
        cpu = node.facts.cpu or "CPU"
        return f"{cpu}, {count_of(node.facts.num_cores, 'core')}" if node.facts.num_cores else cpu
    names = [short_card(gpu.name) for gpu in node.facts.gpus]
    # A dict keeps the order of the slots, a set would not.
    kinds = {name: names.count(name) for name in names}
    shown = [f"{number} x {name}" if number > 1 else name for name, number in kinds.items()]
    shown += [f"{short_card(gpu.name)} (MIG, not used)" for gpu in node.facts.mig_gpus]
    return ", ".join(shown)


def describe_environment(node: NodeSnapshot) -> Status:
    """Return whether a node's training environment is ready."""
    report = node.facts.environment if node.facts else None
    if node.facts is None or report is None:
        return Status("calm", "not known" if node.facts is None else "not set up")
    if report.python is None:
        return Status("calm", "not set up")
    return Status("good", "ready") if report.fits else Status("warning", "differs")


def describe_clock(offset: float | None) -> str:
    """Return how far a clock is from this PC's, in words."""
    if offset is None:
        return DASH
    if abs(offset) < CLOCK_TOLERANCE_S:
        return "in sync"
    return f"{show_duration(abs(offset))} {'ahead' if offset > 0 else 'behind'}"


def disk_free_bytes(node: NodeSnapshot) -> int | None:
    return node.facts.disk_free_bytes if node.facts else None


def node_columns(now_s: Clock, clock_offset: ClockOffset) -> list[Column[NodeSnapshot]]:
    return [
        Column(title="Name", text=lambda n: n.name, width_px=100),
        Column(
            title="State",
            text=lambda n: n.state,
            status=lambda n: describe_node(n, now_s()),
            width_px=172,
        ),
        Column(title="Address", text=lambda n: n.address, width_px=176),
        Column(title="Hardware", text=describe_hardware, stretches=True),
        Column(
            title="Environment",
            text=lambda n: describe_environment(n).text,
            status=describe_environment,
            tip="Python environment for training, the same on every node",
            width_px=116,
        ),
        number_column(
            "Round trip",
            lambda n: n.round_trip_s,
            show_duration,
            width_px=88,
            tip="Time for a request and its response",
        ),
        Column(
            title="Clock",
            # By name: the offset comes from the stream of samples and is not part of a snapshot.
            text=lambda n: describe_clock(clock_offset(n.name)),
            sort=lambda n: unknown_first(clock_offset(n.name)),
            tip="How far the node's clock differs from this PC's",
            width_px=104,
        ),
        number_column("Disk free", lambda n: disk_free_bytes(n), show_bytes, width_px=88),
    ]


def check_columns() -> list[Column[Any]]:
    tones: dict[str, Tone] = {"pass": "good", "warn": "warning", "fail": "error"}
    return [
        Column(
            title="Result",
            text=lambda r: r.status,
            status=lambda r: Status(tones.get(r.status, "calm"), r.status),
            width_px=112,
            # What needs action first.
            sort=lambda r: ("fail", "warn", "unknown", "pass").index(r.status),
        ),
        Column(title="Check", text=lambda r: r.check, width_px=120),
        Column(
            title="Node",
            width_px=120,
            text=lambda r: f"{r.node} \u2192 {r.peer}" if r.peer else r.node,
        ),
        Column(title="Details", text=lambda r: r.message, stretches=True),
    ]

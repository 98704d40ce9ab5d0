"""Columns of the runs, and of one run's ranks, events and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.events import CheckpointSnapshot, RankProgress, RunEvent, RunSnapshot
from app.gui.tables.rows_model import Column, number_column, unknown_first
from app.presentation.plan_text import ComparedRow
from app.telemetry.state import (
    SILENT_STATES,
    Status,
    Tone,
    describe_rank,
    describe_run,
    progress_share,
)
from app.telemetry.step_parts import describe_split, show_rank_memory, split_step
from app.text import (
    DASH,
    show_bytes,
    show_duration,
    show_loss,
    show_moment,
    show_number,
    show_share,
)

Clock = Callable[[], float]


def describe_steps(run: RunSnapshot) -> str:
    if run.step is None or run.total_steps is None:
        return DASH
    return f"{run.step:,} / {run.total_steps:,}"


def run_columns(now_s: Clock) -> list[Column[RunSnapshot]]:
    return [
        Column(title="Name", text=lambda r: r.name, stretches=True),
        Column(
            title="State",
            text=lambda r: r.state,
            status=lambda r: describe_run(r.state, r.phase, is_silent=bool(r.silent_nodes)),
            width_px=140,
        ),
        Column(
            title="Progress",
            text=describe_steps,
            # By share and not by step: runs differ in length.
            sort=lambda r: unknown_first(progress_share(r)),
            progress=progress_share,
            tip="Optimizer steps done, of the total",
            width_px=176,
        ),
        number_column("Loss", lambda r: r.loss, show_loss, width_px=72),
        Column(
            title="Tokens/s",
            text=lambda r: show_number(r.tokens_per_s if r.state == "running" else None),
            sort=lambda r: unknown_first(r.tokens_per_s),
            tip="Tokens trained per second, all devices together",
            is_number=True,
            width_px=84,
        ),
        Column(
            title="Time left",
            text=lambda r: show_duration(r.remaining_s if r.state == "running" else None),
            sort=lambda r: unknown_first(r.remaining_s),
            is_number=True,
            width_px=96,
        ),
        Column(title="Nodes", text=lambda r: ", ".join(r.nodes), width_px=170),
        Column(
            title="Started",
            text=lambda r: show_moment(r.started_s or r.created_s, now_s()),
            sort=lambda r: r.created_s,  # a run that waits has no start
            width_px=110,
        ),
    ]


def wait_share(rank: RankProgress) -> float | None:
    """Return the share of a step that a rank spends waiting for other ranks and the network."""
    if rank.wait_s is None or not rank.step_s:
        return None
    return rank.wait_s / rank.step_s


def forecast_columns() -> list[Column[ComparedRow]]:
    return [
        Column(title="Metric", text=lambda r: r.what, stretches=True),
        Column(title="Forecast", text=lambda r: r.foretold, is_number=True, width_px=140),
        Column(title="Measured", text=lambda r: r.measured, is_number=True, width_px=140),
        Column(
            title="Difference",
            text=lambda r: r.error,
            tip="Above 0: the forecast was too high",
            is_number=True,
            width_px=96,
        ),
    ]


def _describe_rank(rank: RankProgress, now_s: float) -> Status:
    if rank.state in SILENT_STATES:
        return Status("warning", describe_rank(rank, now_s))
    tones: dict[str, Tone] = {"failed": "error", "lost": "error", "done": "good", "ended": "calm"}
    # A running rank says more by its phase than by its state.
    words = rank.phase if rank.state == "running" and rank.phase else rank.state
    return Status(tones.get(rank.state, "busy"), words)


def rank_columns(now_s: Clock = time.time) -> list[Column[RankProgress]]:
    return [
        Column(title="Rank", text=lambda r: str(r.rank), sort=lambda r: r.rank, width_px=74),
        Column(title="Node", text=lambda r: r.node, width_px=80, stretches=True),
        Column(title="Device", text=lambda r: r.device, width_px=84),
        Column(
            title="State",
            text=lambda r: describe_rank(r, now_s()),
            status=lambda r: _describe_rank(r, now_s()),
            width_px=126,
        ),
        number_column("Step", lambda r: r.step, show_number, width_px=72),
        number_column("Tokens/s", lambda r: r.tokens_per_s, show_number, width_px=82),
        number_column("Step time", lambda r: r.step_s, show_duration, width_px=84),
        Column(
            title="MFU",
            text=lambda r: show_share(r.mfu, 1),
            sort=lambda r: unknown_first(r.mfu),
            is_number=True,
            width_px=70,
            tip=(
                "Model FLOPs utilization: arithmetic of the model as a share of what the device "
                "could do"
            ),
        ),
        Column(
            title="Time split",
            text=describe_split,
            # An empty tuple, while a part is unknown, leaves a plain cell with the dash of `text`.
            split=lambda r: tuple(part.share for part in split_step(r)),
            width_px=88,
            tip="Where step time goes, left to right: input, compute, waiting, optimizer",
        ),
        number_column(
            "Waiting",
            lambda r: wait_share(r),
            show_share,
            width_px=76,
            tip="Share of each step spent waiting for other ranks and the network",
        ),
        Column(
            title="Memory",
            text=show_rank_memory,
            sort=lambda r: unknown_first(r.memory_bytes),
            is_number=True,
            width_px=126,
            tip="Peak memory for training on the device. After +: spare memory that holds "
            "unpacked 4-bit weights and is given back when needed",
        ),
        number_column(
            "Share",
            lambda r: r.share,
            show_share,
            width_px=68,
            tip="Share of every batch that this rank computes; it follows the device's speed",
        ),
    ]


def event_columns(now_s: Clock) -> list[Column[RunEvent]]:
    tones: dict[str, Tone] = {"info": "calm", "warning": "warning", "error": "error"}
    return [
        Column(
            title="Time",
            text=lambda e: show_moment(e.time_s, now_s()),
            sort=lambda e: e.time_s,
            width_px=110,
        ),
        Column(
            title="Event",
            # The filter searches `text`; the cell shows the status.
            text=lambda e: e.text,
            status=lambda e: Status(tones[e.severity], e.text),
            stretches=True,
        ),
    ]


def checkpoint_columns(now_s: Clock) -> list[Column[CheckpointSnapshot]]:
    return [
        Column(
            title="Step", text=lambda c: show_number(c.step), sort=lambda c: c.step, width_px=80
        ),
        Column(
            title="Saved",
            text=lambda c: show_moment(c.created_s, now_s()),
            sort=lambda c: c.created_s,
            width_px=120,
        ),
        number_column("Size", lambda c: c.size_bytes, show_bytes, width_px=88),
        number_column(
            "Stall",
            lambda c: c.stall_s,
            show_duration,
            width_px=88,
            tip="How long training paused; the rest is written in the background",
        ),
        Column(title="Copies on", text=lambda c: ", ".join(c.nodes) or DASH, stretches=True),
        Column(
            title="Verified",
            text=lambda c: _verified(c).text,
            status=_verified,
            width_px=180,
            tip="Whether every file of every copy matches its hash",
        ),
    ]


def _verified(checkpoint: CheckpointSnapshot) -> Status:
    if checkpoint.problem:
        return Status("error", checkpoint.problem)
    if checkpoint.verified is None:
        return Status("calm", "not verified")
    return Status("good", "verified") if checkpoint.verified else Status("error", "damaged")

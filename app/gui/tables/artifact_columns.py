"""Columns of the artifacts, and of one artifact's measurements and copies."""

from __future__ import annotations

from collections.abc import Callable

from app.artifact import (
    ArtifactCopy,
    ArtifactSnapshot,
    Verdict,
    describe_kind,
    describe_places,
    describe_verdicts,
)
from app.gui.tables.rows_model import Column
from app.telemetry.state import Status, Tone
from app.text import DASH, show_bytes, show_moment, show_number

Clock = Callable[[], float]


def _judge(artifact: ArtifactSnapshot) -> Status:
    words = describe_verdicts(artifact)
    if not artifact.verdicts:
        return Status("calm", words)
    return Status("good" if words == "keep" else "warning", words)


def _locate(artifact: ArtifactSnapshot) -> Status:
    can_be_had = any(one.counts for one in artifact.copies)
    return Status("good" if can_be_had else "error", describe_places(artifact))


def artifact_columns(now_s: Clock) -> list[Column[ArtifactSnapshot]]:
    return [
        Column(title="Name", text=lambda a: a.label, stretches=True),
        Column(title="Format", text=describe_kind, width_px=196),
        Column(
            title="Size",
            text=lambda a: show_bytes(a.size_bytes),
            sort=lambda a: a.size_bytes,
            is_number=True,
            width_px=84,
        ),
        Column(
            title="Run",
            text=lambda a: a.origin.run_name if a.origin else DASH,
            tip="Run that the artifact was exported from",
            width_px=116,
        ),
        Column(
            title="Verdict",
            text=describe_verdicts,
            status=_judge,
            tip="Whether the measurements support keeping it",
            width_px=140,
        ),
        Column(title="Where", text=describe_places, status=_locate, width_px=190),
        Column(
            title="Created",
            text=lambda a: show_moment(a.created_s, now_s()),
            sort=lambda a: a.created_s,
            width_px=128,
        ),
    ]


def measured_columns() -> list[Column[Verdict]]:
    return [
        Column(title="File", text=lambda v: v.name, width_px=92),
        Column(
            title="Verdict",
            text=lambda v: "keep" if v.keep else "do not keep",
            status=lambda v: Status("good", "keep") if v.keep else Status("warning", "do not keep"),
            width_px=130,
        ),
        Column(
            title="KL",
            text=lambda v: f"{v.kl:.2g}",
            sort=lambda v: v.kl,
            tip="KL divergence from the original's next-token distribution, in nats per token",
            is_number=True,
            width_px=90,
        ),
        Column(
            title="KL of plain rounding",
            text=lambda v: f"{v.control_kl:.2g}",
            sort=lambda v: v.control_kl,
            tip="Baseline: the same model, only rounded to 4 bits",
            is_number=True,
            width_px=104,
        ),
        Column(
            title="Perplexity",
            text=lambda v: f"{v.perplexity:.4g}",
            sort=lambda v: v.perplexity,
            is_number=True,
            width_px=96,
        ),
        Column(
            title="Original",
            text=lambda v: f"{v.original_perplexity:.4g}",
            sort=lambda v: v.original_perplexity,
            is_number=True,
            width_px=96,
        ),
        Column(
            title="Size",
            text=lambda v: show_bytes(v.size_bytes),
            sort=lambda v: v.size_bytes,
            is_number=True,
            width_px=84,
        ),
        Column(
            title="Tokens/s",
            text=lambda v: show_number(v.tokens_per_s),
            sort=lambda v: v.tokens_per_s,
            tip="For one text at a time, on the node that made the artifact",
            is_number=True,
            width_px=84,
        ),
        Column(title="Issues", text=lambda v: " ".join(v.problems), stretches=True),
    ]


def _describe_state(copy: ArtifactCopy) -> Status:
    tones: dict[str, Tone] = {"whole": "good", "unknown": "calm"}
    words = {"unknown": "not reached"}.get(copy.state, copy.state)
    return Status(tones.get(copy.state, "error"), words)


def copy_columns(now_s: Clock) -> list[Column[ArtifactCopy]]:
    kinds = {"folder": "This PC", "node": "Node", "hub": "Hub"}
    return [
        Column(title="Kind", text=lambda c: kinds[c.kind], width_px=90),
        Column(title="State", text=lambda c: c.state, status=_describe_state, width_px=124),
        Column(title="Where", text=lambda c: c.place, stretches=True),
        Column(
            title="Last verified", text=lambda c: show_moment(c.checked_s, now_s()), width_px=110
        ),
        Column(title="Details", text=lambda c: c.problem, width_px=280),
    ]

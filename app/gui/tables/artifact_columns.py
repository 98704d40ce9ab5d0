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
from app.gui.tables.rows_model import Column, number_column
from app.telemetry.state import Status, Tone
from app.text import DASH, show_bytes, show_moment, show_number

Clock = Callable[[], float]


def _judge(artifact: ArtifactSnapshot) -> Status:
    words = describe_verdicts(artifact)
    # Lossless or not measured: neither is a reason to praise or to warn.
    if not artifact.verdicts:
        return Status("calm", words)
    # One bad file is enough for a warning; the words then name it.
    return Status("good" if words == "keep" else "warning", words)


def _locate(artifact: ArtifactSnapshot) -> Status:
    # A copy on a node that cannot be reached counts: it is probably still there.
    can_be_had = any(one.counts for one in artifact.copies)
    return Status("good" if can_be_had else "error", describe_places(artifact))


def artifact_columns(now_s: Clock) -> list[Column[ArtifactSnapshot]]:
    return [
        Column(title="Name", text=lambda a: a.label, stretches=True),
        Column(title="Format", text=describe_kind, width_px=196),
        number_column("Size", lambda a: a.size_bytes, show_bytes, width_px=84),
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
        number_column(
            "KL",
            lambda v: v.kl,
            "{:.2g}".format,
            width_px=90,
            tip="KL divergence from the original's next-token distribution, in nats per token",
        ),
        number_column(
            "KL of plain rounding",
            lambda v: v.control_kl,
            "{:.2g}".format,
            width_px=104,
            tip="Baseline: the same model, only rounded to 4 bits",
        ),
        number_column("Perplexity", lambda v: v.perplexity, "{:.4g}".format, width_px=96),
        number_column("Original", lambda v: v.original_perplexity, "{:.4g}".format, width_px=96),
        number_column("Size", lambda v: v.size_bytes, show_bytes, width_px=84),
        number_column(
            "Tokens/s",
            lambda v: v.tokens_per_s,
            show_number,
            width_px=84,
            tip="For one text at a time, on the node that made the artifact",
        ),
        Column(title="Issues", text=lambda v: " ".join(v.problems), stretches=True),
    ]


def _describe_state(copy: ArtifactCopy) -> Status:
    tones: dict[str, Tone] = {"whole": "good", "unknown": "calm"}
    # Unknown means that its place did not answer, which says nothing about the copy.
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

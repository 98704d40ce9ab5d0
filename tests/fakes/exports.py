"""Forecasts of exports, as the planner gives them."""

from __future__ import annotations

from typing import Any

from app.artifacts.estimates.forecast import ArtifactForecast
from app.artifacts.estimates.plan import ExportPlan, PlacePlan
from app.artifacts.estimates.work import PhaseForecast
from app.artifacts.exports.request import ExportRequest

GIB = 1 << 30
_GIB = {
    "merged": 12.6, "nf4": 3.7, "awq": 3.7, "4-bit": 3.6, "8-bit": 6.9, "F16": 12.6, "Q8_0": 6.7,
    "Q6_K": 5.2, "Q5_K_M": 4.5, "Q4_K_M": 3.8, "Q3_K_M": 3.1,
}  # fmt: skip


def ask_export(run_id: str, to: str = "merged", **options: Any) -> ExportRequest:
    """Return a request for an export."""
    return ExportRequest(run_id=run_id, to=to, **options)


def make_export_plan(to: str, types: tuple[str, ...] = ()) -> ExportPlan:
    """Return a plan of Llama-2-7B: two nodes can make it, the others say why not."""
    files = tuple((name, int(_GIB.get(name, 6.0) * GIB)) for name in types or (to,))
    made = ArtifactForecast(merged_bytes=int(12.6 * GIB), files=files, temporary_bytes=GIB)
    phases = (
        PhaseForecast(name="merge", seconds=70.0, ram_bytes=9 * GIB, vram_bytes=None),
        PhaseForecast(name="quantize", seconds=160.0, ram_bytes=7 * GIB, vram_bytes=6 * GIB),
    )
    slow = tuple(
        PhaseForecast(name=one.name, seconds=3 * one.seconds, ram_bytes=9 * GIB, vram_bytes=None)
        for one in phases
    )
    places = (
        PlacePlan(node="beta", phases=phases, node_bytes=made.node_bytes),
        PlacePlan(
            node="alpha",
            phases=slow,
            node_bytes=made.node_bytes,
            note="run poems-2 uses its GPU, so its CPU does the work",
        ),
        PlacePlan(node="delta", problems=("has no complete copy of the checkpoint",)),
        PlacePlan(node="gamma", problems=("needs 21.4 GiB on its disk, and 12.0 GiB are free",)),
    )
    return ExportPlan(to=to, types=types, step=400, made=made, places=places)

"""How near plans come to whole runs that were measured: seconds of a step, and memory.

Rows of the table (tests/app/planning/measured_runs.json) are planned as a person would plan them:
what was unknown before the run is unknown to the plan. Where the trainer's setting is known, the
memory of exactly that setting is forecast.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.node import Calibration
from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.planning.build_context import open_case
from app.planning.candidate import DataSize, PlanRequest
from app.planning.hardware.cluster import Cluster, PlannedGpu, PlannedNode
from app.planning.memory.forecast import GIB, Fit, MemorySetting
from app.planning.plan_context import Case, Worker
from app.planning.setting_search import share_unpacked
from app.planning.shape.model_shape import read_shape
from app.planning.strategies.data_parallel import plan_data

TABLE = Path(__file__).parents[2] / "app" / "planning" / "measured_runs.json"
# Memory of an H200 that its driver keeps for itself.
_RESERVED_BYTES = 645 * 10**6


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What the planner says of a row."""

    step_s: float
    allocated_gib: float
    whole_gib: float
    fits: bool
    setting: MemorySetting


def read_runs(path: Path = TABLE) -> dict[str, Any]:
    """Return the table: `shapes` by name, `rows` and a `calibration`."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return found


def forecast_run(
    table: dict[str, Any], row: dict[str, Any], *, calibrated: bool = False
) -> RunForecast | None:
    """Return the forecast of a row; None: too little of the run is known."""
    if row["batch"] is None or row["mean"] is None:
        return None
    targets = row["targets"]
    adapter = AdapterSpec(
        kind=row["kind"],
        rank=row["rank"],
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=row["dropout"],
        dora=row["dora"],
    )
    spec = RunSpec(
        model="bench",
        data=DataSpec(train="rows.jsonl"),
        adapter=adapter,
        objective=row["objective"],
        optimizer=row["optimizer"],
        sequence_tokens=row["sequence"],
        batch_sequences=row["batch"],
        memory_gib=row["cap_gib"],
        packing=row["packing"],
        recompute=row["recompute"],
        compile="auto" if row["compiled"] else "off",
    )
    found = Calibration(card="NVIDIA H200", **table["calibration"]) if calibrated else None
    gpu = PlannedGpu(
        name="NVIDIA H200", reserved_bytes=_RESERVED_BYTES, capability=(9, 0), calibration=found
    )
    node = PlannedNode(name="node", gpus=(gpu,), ram_bytes=128 * GIB, system="linux")
    data = DataSize(num_rows=1000, mean_tokens=row["mean"], longest_tokens=row["longest"])
    shape = read_shape(table["shapes"][row["shape"]])
    case = open_case(PlanRequest(spec=spec, shape=shape, data=data, cluster=Cluster(nodes=(node,))))
    worker = case.workers[0]
    if row["setting"] is not None:
        _choose(case, worker, row["setting"])
    planned = plan_data(case, (worker,), mode="single")
    memory = planned.gpus[0].memory
    return RunForecast(
        step_s=planned.step_s,
        allocated_gib=memory.allocated_bytes / GIB,
        whole_gib=memory.expected_bytes / GIB,
        fits=planned.fits,
        setting=planned.gpus[0].setting,
    )


def _choose(case: Case, worker: Worker, wanted: dict[str, int]) -> None:
    """Let the case believe that the trainer's search finds this setting."""
    setting = MemorySetting(
        micro_tokens=wanted["tokens"],
        num_recomputed=wanted["num_recomputed"],
        num_moved=wanted["num_moved"],
    )
    memory = case.forecast(worker, setting, 1)
    case.fits[(*worker.like, 1)] = Fit(
        setting=setting,
        memory=memory,
        room_bytes=worker.memory.room_bytes,
        unpacked_share=share_unpacked(case.shape, case.spec, worker.memory, memory),
    )


def show_runs(table: dict[str, Any]) -> None:
    """Print every row with its forecast, plain and calibrated."""
    for row in table["rows"]:
        found = forecast_run(table, row)
        name = f"{row['shape']:13} {row['kind']:5} {row['sequence']:5} x {row['batch'] or '?':<3}"
        name += f" under {row['cap_gib']:2} GiB{'' if row['compiled'] else ', not compiled'}"
        if found is None or row["step_s"] is None:
            fits = "unknown" if found is None else f"fits: {found.fits}"
            print(f"{name}: {fits}; measured {row['step_s']} s, {row['allocated_gib']} GiB")
            continue
        after = forecast_run(table, row, calibrated=True)
        assert after is not None
        steps = [one.step_s / row["step_s"] - 1 for one in (found, after)]
        setting = found.setting
        print(
            f"{name}: step {found.step_s:.2f} s of {row['step_s']:.2f} ({steps[0]:+.0%}, calibrated"
            f" {steps[1]:+.0%}); allocated {found.allocated_gib:.1f} GiB of"
            f" {row['allocated_gib']:.1f}; {setting.micro_tokens} tokens,"
            f" {setting.num_recomputed} recomputed, {setting.num_moved} moved"
        )

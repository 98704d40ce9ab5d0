"""Our trainer as it is started for a run, and what the planner says of the run beforehand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from agents.contract.wire import to_wire
from app.planning.cluster import Cluster, PlannedGpu, PlannedNode, ethernet
from app.planning.memory.forecast import GIB, GpuMemory, MemorySetting, estimate_memory
from app.planning.model_shape import ModelShape, read_shape
from app.planning.plan import DataSize, PlanRequest, make_plan
from tests.agents.trainer.ranks import finish, free_port, read_journal, start_rank
from tests.bench.engine_shapes import read_config
from tests.bench.fresh_process import Emit, first_line, run_fresh

SKIPPED_STEPS = 6
"""Steps before the first that counts: shapes are recorded in them, and the speed is watched."""
LIMIT_S = 420.0


class RunFailed(Exception):
    """Raised where our trainer ends without a result; says why."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The device as the planner sees it."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int

    @property
    def memory(self) -> GpuMemory:
        """Input of the memory forecast."""
        return GpuMemory(
            total_bytes=self.total_bytes, capability=self.capability,
            num_multiprocessors=self.num_multiprocessors,
        )  # fmt: skip


def make_spec(kind: str, targets: tuple[str, ...], **changes: Any) -> RunSpec:
    """Return a run that saves nothing before its end; `rank` and `dora` are the adapter's."""
    adapter = {key: changes.pop(key) for key in ("rank", "dora") if key in changes}
    return RunSpec(
        model="bench",
        data=DataSpec(train="rows.jsonl"),
        adapter=AdapterSpec(kind=kind, dropout=0.0, targets=targets, **adapter),  # type: ignore[arg-type]
        checkpoint=CheckpointSpec(every_minutes=None),
        **changes,
    )


def run_trainer(
    home: Path, run_id: str, spec: RunSpec, model: Path, rows: Path, device: str,
    *, target: Callable[[dict[str, str]], None] | None = None, limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train in an agent's home with the real entry, or with `target`; return the journal.

    Raises:
        RunFailed: the run did not end well, or not within `limit_s`.
    """
    intent = AttemptIntent(
        run_id=run_id, attempt=1, node="here", spec=spec, python=sys.executable,
        ranks=(RankPlacement(rank=0, local_rank=0, node="here", device=device, device_id=device),),
        master_address="127.0.0.1", master_port=free_port(), address="127.0.0.1",
        model_path=str(model), train_path=str(rows),
    )  # fmt: skip
    folder = home / "runs" / run_id / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "intent.json").write_text(json.dumps(to_wire(intent)), encoding="ascii")
    environ = {"OMP_NUM_THREADS": "1" if device == "cpu" else "4"}
    (code,) = finish([start_rank(intent, 0, folder, environ, target)], limit_s)
    lines = read_journal(folder, 0)
    if code != 0:
        said = [line["message"] for line in lines if line["kind"] == "failed"]
        log = folder / "rank-0.log"
        tail = log.read_text(errors="replace")[-600:] if log.exists() else ""
        phase = [line["phase"] for line in lines if line["kind"] == "phase"][-1:]
        raise RunFailed(f"exit code {code} in {phase}: {said or tail}")
    return lines


def summarize(lines: list[dict[str, Any]], skipped: int = SKIPPED_STEPS) -> dict[str, Any]:
    """Return the figures of a run from its journal, without its first steps.

    `tokens_per_s` counts real tokens over whole optimizer steps.
    """
    phases = {line["phase"]: line["time_s"] for line in reversed(lines) if line["kind"] == "phase"}
    steps = [line for line in lines if line["kind"] == "step"]
    late = steps[skipped:] or steps[-1:]
    step_s = sum(line["step_s"] for line in late)
    setting = [line for line in lines if line["kind"] == "setting"][-1]
    known = [line for line in late if line["memory_bytes"] is not None]
    return {
        "tokens_per_s": sum(line["tokens"] for line in late) / step_s,
        "step_s": step_s / len(late),
        "steps": len(late),
        "needed_gib": max((line["memory_bytes"] for line in known), default=0) / GIB,
        "peak_gib": max(
            (line["memory_bytes"] + line["memory_unpacked_bytes"] for line in known), default=0
        ) / GIB,
        "mfu": late[-1].get("mfu"),
        "to_first_step_s": steps[0]["time_s"] - lines[0]["time_s"],
        "import_s": phases["imported"] - lines[0]["time_s"],
        "tune_s": phases["warmup"] - phases.get("tuning", phases["warmup"]),
        "setting": {key: value for key, value in setting.items() if key not in _UNTOLD},
        "believed_tokens_per_s": max((one["tokens_per_s"] for one in setting["tried"]), default=0),
        "events": [line["message"] for line in lines if line["kind"] == "warning"],
    }  # fmt: skip


_UNTOLD = ("kind", "time_s", "tried", "unpacked_bytes")


def forecast(
    spec: RunSpec, model: Path, lengths: list[int], card: Card, setting: dict[str, Any]
) -> dict[str, float]:
    """Return what the planner says of a run.

    Args:
        spec: The run.
        model: Folder with the configuration.
        lengths: Tokens of each row.
        card: The GPU.
        setting: What the trainer chose, as its journal has it.

    Returns:
        `needed_gib`: allocated memory at that setting. `step_s`: seconds of a step, as planned
        without knowing the setting; missing where nothing fits.
    """
    shape = read_shape(read_config(model))
    memory = estimate_memory(
        shape,
        spec,
        setting=MemorySetting(
            micro_tokens=setting["micro_tokens"], num_recomputed=setting["num_recomputed"],
            num_moved=setting["num_moved"],
        ),
        longest_tokens=spec.sequence_tokens if spec.packing else max(lengths),
        gpu=card.memory,
    )  # fmt: skip
    found = {"needed_gib": memory.allocated_bytes / GIB}
    chosen = make_plan(_ask(spec, shape, lengths, card)).chosen
    return found if chosen is None else {**found, "step_s": chosen.step_s}


def _ask(spec: RunSpec, shape: ModelShape, lengths: list[int], card: Card) -> PlanRequest:
    gpu = PlannedGpu(name=card.name, memory_bytes=card.total_bytes, capability=card.capability)
    node = PlannedNode(name="here", gpus=(gpu,), ram_bytes=64 * GIB, system="linux")
    return PlanRequest(
        spec=spec,
        shape=shape,
        data=DataSize(
            num_rows=len(lengths), mean_tokens=sum(lengths) / len(lengths),
            longest_tokens=max(lengths),
        ),
        cluster=Cluster(nodes=(node,), default_link=ethernet(1.0)),
    )  # fmt: skip


def report_card(emit: Emit) -> None:
    """Report the first GPU, and the versions beside it."""
    import torch
    import transformers

    found = torch.cuda.get_device_properties(0)
    card = Card(
        name=found.name, total_bytes=found.total_memory, capability=(found.major, found.minor),
        num_multiprocessors=found.multi_processor_count,
    )  # fmt: skip
    emit({"card": card, "versions": f"torch {torch.__version__}, "
          f"transformers {transformers.__version__}"})  # fmt: skip


def read_card() -> Card | None:
    """Print the first GPU and return it; None: it could not be read."""
    for report in run_fresh(report_card):
        if "error" in report:
            print(f"no GPU: {first_line(report)}", flush=True)
            return None
        print(f"{report['card'].name}, {report['versions']}", flush=True)
        card: Card = report["card"]
    return card

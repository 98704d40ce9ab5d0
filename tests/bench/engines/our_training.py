"""Our trainer as it is started for a run, and what the planner says of the run beforehand."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from agents.contract.wire import to_wire
from app.planning.hardware.cluster import Cluster, PlannedGpu, PlannedNode, ethernet
from app.planning.memory.forecast import GIB, GpuMemory, MemorySetting, estimate_memory
from app.planning.plan import DataSize, PlanRequest, make_plan
from app.planning.shape.model_shape import ModelShape, read_shape
from tests.agents.trainer.ranks import finish, free_port, read_journal, start_rank
from tests.agents.trainer.ranks import run_trainer as run_entry
from tests.bench.engines.engine_shapes import read_config
from tests.bench.engines.fresh_process import Emit, first_line, run_fresh

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
    """Return a run that saves nothing before its end; `rank`, `dora` and `experts` are of the
    adapter.
    """
    named = ("rank", "dora", "experts")
    adapter = {key: changes.pop(key) for key in named if key in changes}
    return RunSpec(
        model="bench",
        data=DataSpec(train="rows.jsonl"),
        adapter=AdapterSpec(kind=kind, dropout=0.0, targets=targets, **adapter),  # type: ignore[arg-type]
        checkpoint=CheckpointSpec(every_minutes=None),
        **changes,
    )


class StartedRun:
    """A run whose process has its imports behind it, and trains once told to.

    Args:
        home: An agent's home.
        run_id: Name of the run.
        spec: What to train.
        model: Folder of the model.
        rows: File of the data.
        device: On which to train.
        target: In place of the trainer's entry.
    """

    def __init__(
        self, home: Path, run_id: str, spec: RunSpec, model: Path, rows: Path, device: str,
        *, target: Callable[[dict[str, str]], None] = run_entry,
    ) -> None:  # fmt: skip
        place = RankPlacement(rank=0, local_rank=0, node="here", device=device, device_id=device)
        intent = AttemptIntent(
            run_id=run_id, attempt=1, node="here", spec=spec, python=sys.executable,
            ranks=(place,), master_address="127.0.0.1", master_port=free_port(),
            address="127.0.0.1", model_path=str(model), train_path=str(rows),
        )  # fmt: skip
        self.spec = spec
        self._folder = home / "runs" / run_id / "attempts" / "1"
        self._folder.mkdir(parents=True)
        intent_file = self._folder / "intent.json"
        intent_file.write_text(json.dumps(to_wire(intent)), encoding="ascii")
        environ = {"OMP_NUM_THREADS": "1" if device == "cpu" else "4"}
        waiting = partial(_wait_and_train, target=target)
        self._process = start_rank(intent, 0, self._folder, environ, waiting)

    def finish(self, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """Train to the end and return the journal.

        Raises:
            RunFailed: the run did not end well, or not within `limit_s`.
        """
        (self._folder / _GO).touch()
        (code,) = finish([self._process], limit_s)
        lines = read_journal(self._folder, 0)
        if code != 0:
            said = [line["message"] for line in lines if line["kind"] == "failed"]
            log = self._folder / "rank-0.log"
            tail = log.read_text(errors="replace")[-600:] if log.exists() else ""
            phase = [line["phase"] for line in lines if line["kind"] == "phase"][-1:]
            raise RunFailed(f"exit code {code} in {phase}: {said or tail}")
        return lines


_GO = "go"
_PATIENCE_S = 900.0


def _wait_and_train(environ: dict[str, str], target: Callable[[dict[str, str]], None]) -> None:
    """Import what the trainer imports, as it does, and train once the file is there."""
    os.environ.update(environ)
    from agents.program import imports_that_stay
    from agents.trainer.__main__ import _configure_torch
    from agents.trainer.rank.attempt import read_attempt

    folder = Path(environ["RACKLESS_ATTEMPT_DIR"])
    _configure_torch(read_attempt(folder, 0, 1).compiled_folder)
    with imports_that_stay():
        import agents.trainer.run  # noqa: F401
    until_s = time.monotonic() + _PATIENCE_S
    while not (folder / _GO).exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    target(environ)


def run_trainer(
    home: Path, run_id: str, spec: RunSpec, model: Path, rows: Path, device: str,
    *, target: Callable[[dict[str, str]], None] = run_entry, limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train in an agent's home with the real entry, or with `target`; return the journal.

    Raises:
        RunFailed: the run did not end well, or not within `limit_s`.
    """
    return StartedRun(home, run_id, spec, model, rows, device, target=target).finish(limit_s)


def summarize(lines: list[dict[str, Any]], skipped: int = SKIPPED_STEPS) -> dict[str, Any]:
    """Return the figures of a run from its journal, without its first steps.

    `tokens_per_s` counts real tokens over whole optimizer steps.
    """
    phases = {line["phase"]: line["time_s"] for line in reversed(lines) if line["kind"] == "phase"}
    # A known setting is compiled rather than searched for; a CPU does neither.
    begun_s = phases.get("tuning", phases.get("compiling", phases["warmup"]))
    steps = [line for line in lines if line["kind"] == "step"]
    late = steps[skipped:] or steps[-1:]
    step_s = sum(line["step_s"] for line in late)
    settings = [line for line in lines if line["kind"] == "setting"]
    setting = settings[-1]  # the search may have been corrected
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
        "tune_s": phases["warmup"] - begun_s,
        "setting": {key: value for key, value in setting.items() if key not in _UNTOLD},
        "believed_tokens_per_s": max(
            (one["tokens_per_s"] for line in settings for one in line.get("tried", ())), default=0
        ),
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

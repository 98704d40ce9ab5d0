"""Seven processes play seven cards: the memory of each stage of a 70B, and its bytes.

The same rows trained by one rank whose layers are streamed show what its losses have to be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.model_cut import ModelCut
from agents.contract.parallel import ParallelMode
from agents.contract.run import RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec, RunSpec
from app.planning.cut import make_cut
from app.planning.memory.forecast import count_trained
from app.planning.plan import DataSize, PlanRequest, make_plan
from app.planning.shape.model_shape import ModelShape, read_shape
from tests.agents.trainer.ranks import Run, make_environ, make_spec
from tests.app.planning.clusters import make_pcs
from tests.bench.engines.chat_rows import make_rows, write_rows
from tests.bench.engines.engine_shapes import GIB, SHAPES, Size, list_values, read_config
from tests.bench.engines.random_model import save_outline

ROOT = Path(__file__).parents[3]
SHAPE = "llama-2-70b"
NUM_STEPS = 3
LEARNING_RATE = 1e-6
"""So small that a first step of AdamW, which moves every value by as much whatever its gradient
is, does not overshoot: random weights would turn each rounding into another loss."""
SHARED_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""With a host id each, ranks of NCCL take one GPU for several."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Three steps over rows of one length, one of them in each micro-batch.

    On a `cpu` the shape is a tiny one, and nothing is limited.
    """

    num_layers: int
    tokens: int
    """Of each row."""
    num_micro: int
    """Rows of a step."""
    cap_gib: float
    """GPU memory of a rank."""


def count_sent_bytes() -> int:
    """Return the bytes that loopback has carried."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def run_stages(trial: Trial, devices: Sequence[str], beside: str | None) -> dict[str, Any]:
    """Train as a pipeline; return peak memory of each stage, losses, and bytes by their forecast.

    Args:
        trial: What to train.
        devices: Of each stage.
        beside: Device that trains the same in one rank with streamed layers at the same time, for
            `loss_difference`, the largest relative one of a step; None: none does.

    Raises:
        RuntimeError: a rank failed; contains the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="rackless-stages-") as folder:
        home = Path(folder)
        size, num_stages = _size_on(devices[0]), len(devices)
        save_outline(home / "model", SHAPE, layers=trial.num_layers, size=size)
        before = count_sent_bytes()
        stages = _Started(home, trial, "pipeline", devices)
        alone = _Started(home, trial, "streamed", [beside]) if beside is not None else None
        steps = stages.finish()
        sent = count_sent_bytes() - before
        expected = alone.finish()[0] if alone is not None else {}
        warnings = {one for run in (stages, alone) if run is not None for one in run.warnings()}
    width = list_values(SHAPE, size=size)["hidden_size"] * (4 if size == "tiny" else 2)
    # Features there, and gradients back, over each border.
    features = 2 * (num_stages - 1) * NUM_STEPS * trial.num_micro * trial.tokens * width
    found = steps[0]
    expected_gib = {"forecast_gib": stages.forecast_gib} if stages.forecast_gib else {}
    return {
        "warnings": sorted(warnings),
        "tokens": trial.tokens,
        "layers": trial.num_layers,
        "peak_gib": [round(_find_peak(one) / GIB, 2) for one in steps],
        **expected_gib,
        "loss": [line["loss"] for _, line in sorted(found.items())],
        "gradient_norm": [line["gradient_norm"] for _, line in sorted(found.items())],
        "step_s": [round(line["step_s"], 2) for _, line in sorted(found.items())],
        "tokens_per_s": _read_speed(trial, found),
        "sent_mb": round(sent / 1e6, 1),
        "forecast_mb": round((features + stages.saved_bytes) / 1e6, 1),
        **_compare(trial, found, expected),
    }


class _Started:
    """Ranks of one run on this PC."""

    def __init__(
        self, home: Path, trial: Trial, parallel: ParallelMode, devices: Sequence[str]
    ) -> None:
        size = _size_on(devices[0])
        spec = make_spec(
            adapter=AdapterSpec(kind="qlora", rank=16, targets=SHAPES[SHAPE].targets),
            sequence_tokens=trial.tokens, batch_sequences=trial.num_micro, max_steps=NUM_STEPS,
            parallel=parallel, recompute="all", learning_rate=LEARNING_RATE,
            memory_gib=trial.cap_gib if size == "full" else None,
            checkpoint=CheckpointSpec(every_minutes=None, every_steps=None),
        )  # fmt: skip
        self._run = Run(home / parallel, home / "model", spec, len(devices))
        words = list_values(SHAPE, size=size)["vocab_size"]
        write_rows(self._run.train, make_rows([trial.tokens] * (2 * trial.num_micro), words))
        ranks = tuple(
            RankPlacement(rank=rank, local_rank=rank, node="here", device=device)
            for rank, device in enumerate(devices)
        )
        shape = read_shape(read_config(home / "model"))
        cut, self.forecast_gib = None, list[float]()
        """Peak memory of each stage as its plan has it, in GiB; empty: nothing was planned."""
        if parallel == "pipeline" and size == "full":
            cut, self.forecast_gib = _plan(spec, shape, trial, len(devices))
        # The first rank saves the state of the layers that others have: values and two moments.
        own = cut.stages[0].num_layers if cut is not None else shape.num_layers / len(devices)
        self.saved_bytes = 12 * count_trained(shape, spec) * (1 - own / shape.num_layers)
        intent = self._run.intend(ranks=ranks, cut=cut)
        folder = self._run.attempt_folder
        shared = {**SHARED_GPU, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.engines.random_stage"],
                env={
                    **os.environ, **make_environ(intent, rank, folder), **shared,
                    "NCCL_HOSTID": f"host{rank}",
                },
                cwd=ROOT,
            )
            for rank in range(len(devices))
        ]  # fmt: skip

    def warnings(self) -> list[str]:
        """Return what the ranks warn of."""
        lines = [one for rank in range(len(self._processes)) for one in self._run.journal(rank)]
        return [line["message"] for line in lines if line["kind"] == "warning"]

    def finish(self) -> list[dict[int, dict[str, Any]]]:
        """Wait for all ranks; return the steps of each.

        Raises:
            RuntimeError: a rank failed; contains the end of its log.
        """
        codes = [process.wait() for process in self._processes]
        if any(codes):
            logs = [self._run.read_log(rank)[-1500:] for rank in range(len(codes))]
            raise RuntimeError("\n".join(logs))
        return [self._run.steps(rank) for rank in range(len(codes))]


def _plan(
    spec: RunSpec, shape: ModelShape, trial: Trial, num_stages: int
) -> tuple[ModelCut, list[float]]:
    """Return what a user's plan cuts for as many PCs with a card each, and each stage's GiB.

    Raises:
        RuntimeError: it does not fit them.
    """
    plan = make_plan(
        PlanRequest(
            spec=spec,
            shape=shape,
            data=DataSize(
                num_rows=2 * trial.num_micro, mean_tokens=trial.tokens, longest_tokens=trial.tokens
            ),
            cluster=make_pcs(*["RTX 4070"] * num_stages),
        )
    )
    if plan.chosen is None or not plan.chosen.fits:
        raise RuntimeError(f"no plan fits {num_stages} cards: {plan.advice}")
    places = [
        RankPlacement(rank=place, local_rank=0, node=gpu.node, device=gpu.device)
        for place, gpu in enumerate(sorted(plan.chosen.gpus, key=lambda one: one.layers or (0, 0)))
    ]
    cut = make_cut(plan.chosen, places, shape.num_layers)
    assert cut is not None
    by_node = {gpu.node: gpu.memory.allocated_bytes / GIB for gpu in plan.chosen.gpus}
    return cut, [round(by_node[place.node], 2) for place in places]


def _size_on(device: str) -> Size:
    return "tiny" if device == "cpu" else "full"


def _find_peak(steps: dict[int, dict[str, Any]]) -> int:
    return max(line["memory_bytes"] for line in steps.values())


def _read_speed(trial: Trial, steps: dict[int, dict[str, Any]]) -> float:
    """Return the speed of the last step."""
    return round(trial.num_micro * trial.tokens / steps[max(steps)]["step_s"], 1)


def _compare(
    trial: Trial, found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    if not expected:
        return {}
    worst = max(abs(found[step]["loss"] / line["loss"] - 1) for step, line in expected.items())
    return {
        "streamed_tokens_per_s": _read_speed(trial, expected),
        "streamed_loss": [line["loss"] for _, line in sorted(expected.items())],
        "streamed_gradient_norm": [line["gradient_norm"] for _, line in sorted(expected.items())],
        "streamed_peak_gib": round(_find_peak(expected) / GIB, 2),
        "loss_difference": worst,
    }

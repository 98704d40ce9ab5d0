"""The same trainer on NVIDIA GPUs: it learns, it resumes to the bit, over NCCL too.

Needs GPUs, so it is never part of the normal run: `python -m pytest -m gpu tests/agents/trainer`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agents.contract.run import RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.ranks import DEMO, Run, make_spec, wait_until

pytestmark = pytest.mark.gpu

NUM_STEPS = 20
HALF = NUM_STEPS // 2
ROOT = Path(__file__).parents[3]


def require_gpus(number: int) -> None:
    import torch

    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} NVIDIA GPUs, there are {torch.cuda.device_count()}")


def make_run(home: Path, num_ranks: int, **changes) -> Run:
    changes.setdefault("adapter", AdapterSpec(rank=8, alpha=16, dropout=0.1))
    spec = make_spec(
        batch_sequences=24,
        sequence_tokens=128,
        max_steps=NUM_STEPS,
        learning_rate=3e-3,
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=HALF, keep=9),
        **changes,
    )
    run = Run(home, DEMO / "model", spec, num_ranks)
    run.train = DEMO / "train.jsonl"
    return run


def start(
    run: Run, device: str = "cuda", environs: Sequence[dict[str, str]] | None = None, **changes
) -> list[subprocess.Popen[bytes]]:
    """Start the next attempt in processes of its own, one for each device.

    Args:
        run: to start.
        device: cpu or cuda.
        environs: more variables of each rank.
        changes: to the intent; without `ranks` all are of one node, each on its own device.
    """
    ranks = tuple(
        RankPlacement(
            rank=rank,
            local_rank=rank,
            node="here",
            device="cpu" if device == "cpu" else f"cuda:{rank}",
        )
        for rank in range(run.num_ranks)
    )
    intent = run.intend(**{"ranks": ranks, **changes})
    return [
        subprocess.Popen(
            [sys.executable, "-m", "agents.trainer"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "RACKLESS_ATTEMPT_DIR": str(run.attempt_folder),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(run.num_ranks),
                "LOCAL_WORLD_SIZE": str(run.num_ranks),
                "MASTER_ADDR": intent.master_address,
                "MASTER_PORT": str(intent.master_port),
                **(environs[rank] if environs else {}),
            },
        )
        for rank in range(run.num_ranks)
    ]


def train(run: Run, device: str = "cuda", **changes) -> None:
    """Run the next attempt to its end."""
    started = start(run, device, **changes)
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * run.num_ranks, run.read_log(0)


def train_until_killed(run: Run) -> None:
    """Run the next attempt and kill every rank some steps after its first checkpoint."""
    started = start(run)
    try:
        wait_until(lambda: HALF + 3 in run.steps() and run.checkpoint(HALF).exists(), 240)
    finally:
        for process in started:
            process.kill()
            process.wait()


def losses(run: Run) -> dict[int, str]:
    return {step: line["loss_hex"] for step, line in run.steps().items()}


def settings(run: Run, rank: int, attempt: int) -> tuple[tuple[int, int, int], ...]:
    """Return how much was computed at once, and how, as an attempt chose it."""
    lines = [line for line in run.journal(rank, attempt) if line["kind"] == "setting"]
    return tuple((x["micro_tokens"], x["num_recomputed"], x["num_moved"]) for x in lines)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize(
    ("num_ranks", "shares"), [(1, None), (2, (5.0, 3.0))], ids=["one-gpu", "two-over-nccl"]
)
def test_a_killed_run_goes_on_to_the_bit(tmp_path, num_ranks, shares, kind):
    require_gpus(num_ranks)
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    adapter = AdapterSpec(kind=kind, rank=8, alpha=16, dropout=0.1)
    run = make_run(tmp_path / "home", num_ranks, shares=shares, adapter=adapter)
    train(run)
    lines, expected = run.steps(), losses(run)
    assert lines[NUM_STEPS]["loss"] < 0.6 * lines[1]["loss"]
    made = (run.checkpoint(NUM_STEPS) / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(run.folder / "checkpoints")
    train_until_killed(run)
    train(run, resume_step=HALF)
    for rank in range(num_ranks):
        chosen = {settings(run, rank, attempt) for attempt in (1, 2, 3)}
        assert len(chosen) == 1, f"rank {rank} has to add up alike in all attempts"
    assert losses(run) == {step: expected[step] for step in range(HALF + 1, NUM_STEPS + 1)}
    assert (run.checkpoint(NUM_STEPS) / "adapter_model.safetensors").read_bytes() == made
    print(f"\n{num_ranks} GPU(s): loss {lines[1]['loss']:.4f} -> {lines[NUM_STEPS]['loss']:.4f}")


def test_two_gpus_compute_what_a_cpu_computes(tmp_path):
    require_gpus(2)
    on_cpu = make_run(tmp_path / "cpu", 1, precision="fp32")
    train(on_cpu, "cpu")
    on_gpus = make_run(tmp_path / "gpus", 2, precision="fp32", shares=(5.0, 3.0))
    train(on_gpus)
    pairs = [
        (on_cpu.steps()[step]["loss"], on_gpus.steps()[step]["loss"])
        for step in range(1, NUM_STEPS + 1)
    ]
    worst = max(abs(a - b) / a for a, b in pairs)
    print(f"\nCPU against two GPUs, {NUM_STEPS} steps in fp32: worst difference {worst:.2e}")
    assert worst < 1e-3

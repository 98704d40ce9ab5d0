"""The same trainer on NVIDIA GPUs: it learns, it resumes to the bit, over NCCL too.

Needs GPUs, so it is never part of the normal run: `python -m pytest -m gpu tests/agents/trainer`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agents.protocol import RankPlacement
from agents.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.ranks import DEMO, Run, make_spec

pytestmark = pytest.mark.gpu

NUM_STEPS = 20
HALF = NUM_STEPS // 2
ROOT = Path(__file__).parents[3]


def require_gpus(number: int) -> None:
    import torch

    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} NVIDIA GPUs, there are {torch.cuda.device_count()}")


def make_run(home: Path, num_ranks: int, **changes) -> Run:
    spec = make_spec(
        adapter=AdapterSpec(rank=8, alpha=16, dropout=0.1),
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


def train(run: Run, device: str = "cuda", **changes) -> None:
    """Run the next attempt in processes of its own, one for each device."""
    ranks = tuple(
        RankPlacement(
            rank=rank,
            local_rank=rank,
            node="here",
            device="cpu" if device == "cpu" else f"cuda:{rank}",
        )
        for rank in range(run.num_ranks)
    )
    intent = run.intend(ranks=ranks, **changes)
    started = [
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
            },
        )
        for rank in range(run.num_ranks)
    ]
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * run.num_ranks, run.read_log(0)


def losses(run: Run) -> dict[int, str]:
    return {step: line["loss_hex"] for step, line in run.steps().items()}


@pytest.mark.parametrize(
    ("num_ranks", "shares"), [(1, None), (2, (5.0, 3.0))], ids=["one-gpu", "two-over-nccl"]
)
def test_gpus_learn_and_resume_to_the_bit(tmp_path, num_ranks, shares):
    require_gpus(num_ranks)
    straight = make_run(tmp_path / "straight", num_ranks, shares=shares)
    train(straight)
    lines = straight.steps()
    assert lines[NUM_STEPS]["loss"] < 0.6 * lines[1]["loss"]
    half = make_run(tmp_path / "half", num_ranks, shares=shares)
    half.attempt = straight.attempt
    half.checkpoint(HALF).parent.mkdir(parents=True)
    straight.checkpoint(HALF).rename(half.checkpoint(HALF))
    train(half, resume_step=HALF)
    expected = losses(straight)
    assert losses(half) == {step: expected[step] for step in range(HALF + 1, NUM_STEPS + 1)}
    name = "adapter_model.safetensors"
    made = [run.checkpoint(NUM_STEPS) / name for run in (straight, half)]
    assert made[0].read_bytes() == made[1].read_bytes()
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

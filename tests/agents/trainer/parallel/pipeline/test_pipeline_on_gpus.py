"""Stages and streamed layers on GPUs learn what one GPU learns that holds everything.

Three ranks play three PCs over NCCL, on as many GPUs as there are: `python -m pytest -m gpu
tests/agents/trainer/parallel/pipeline/test_pipeline_on_gpus.py`.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.model_cut import ModelCut, Stage
from agents.contract.run import RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.rank.test_loss_on_gpus import SOCKETS
from tests.agents.trainer.ranks import Run, make_pairs, make_tiny_model, wait_until
from tests.agents.trainer.test_two_gpus import NUM_STEPS, make_run, require_gpus, start, train

pytestmark = pytest.mark.gpu

NODES = ("a", "b", "c")
NUM_LAYERS = 4
TOLERANCE = 1e-4
"""Largest relative difference of a loss: sums of fp32 in another order, over twenty steps."""
ENDED_S = 15.0
"""Longest time from the loss of a stage to the end of the others, in seconds."""

# Else NCCL takes several ranks on one GPU for an error.
ENVIRONS = [{**SOCKETS, "NCCL_NET": "Socket", "NCCL_HOSTID": f"pc-{node}"} for node in NODES]
DORA = AdapterSpec(rank=8, alpha=16, dropout=0.1, dora=True)


def make(home: Path, objective: str, **changes: Any) -> Run:
    run = make_run(
        home, 1, precision="fp32", compile="off", objective=objective, rebalance=False, **changes
    )
    if objective == "dpo":
        run.train = home / "pairs.jsonl"
        make_pairs(run.train, num_rows=48)
    return run


def cut_unevenly(*, offloads: bool) -> dict[str, Any]:
    """Return the changes to the intent that make each rank a stage on a node of its own."""
    import torch

    count = torch.cuda.device_count()
    ends = (0, 2, 3, NUM_LAYERS)
    stages = tuple(
        Stage(
            rank=rank, first_layer=ends[rank], stop_layer=ends[rank + 1],
            has_embedding=rank == 0, has_head=rank == len(NODES) - 1,
            num_recomputed=ends[rank + 1] - ends[rank] if offloads else None, offloads=offloads,
        )
        for rank in range(len(NODES))
    )  # fmt: skip
    places = tuple(
        RankPlacement(rank=rank, local_rank=0, node=node, device=f"cuda:{rank % count}")
        for rank, node in enumerate(NODES)
    )
    return {
        "node": NODES[0],
        "ranks": places,
        "cut": ModelCut(mode="pipeline", stages=stages, micro_sequences=2),
    }


@pytest.mark.parametrize(
    ("objective", "adapter", "offloads"),
    [
        pytest.param("sft", AdapterSpec(rank=8, alpha=16, dropout=0.1), True, id="offloading"),
        pytest.param("dpo", DORA, False, id="pairs-dora"),
    ],
)
def test_three_stages_learn_what_one_gpu_learns(tmp_path, objective, adapter, offloads):
    require_gpus(1)
    one = make(tmp_path / "one", objective, adapter=adapter)
    train(one)
    run = make(tmp_path / "cut", objective, adapter=adapter, parallel="pipeline")
    run.num_ranks = len(NODES)
    train(run, environs=ENVIRONS, **cut_unevenly(offloads=offloads))
    assert compare(run, one) < TOLERANCE


@pytest.mark.parametrize(("kind", "memory_gib"), [("lora", 1.8), ("qlora", 0.3)])
def test_streamed_layers_with_dora_learn_what_one_gpu_learns(tmp_path, kind, memory_gib):
    require_gpus(1)
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    adapter = replace(DORA, kind=kind)
    # 1.1 GB in fp32, 0.15 GB in NF4.
    model = make_tiny_model(tmp_path / "model", 24, hidden_size=1024, intermediate_size=2816)
    one = make(tmp_path / "one", "sft", adapter=adapter)
    run = make(tmp_path / "streamed", "sft", adapter=adapter, parallel="streamed")
    run.spec = replace(run.spec, memory_gib=memory_gib)
    one.model = run.model = model
    train(one)
    train(run, cut=ModelCut(mode="streamed"))
    (setting,) = (line for line in run.journal() if line["kind"] == "setting")
    print(f"\n{setting['num_streamed']} of {setting['num_layers']} layers are streamed")
    assert compare(run, one) < TOLERANCE


def test_the_others_end_soon_where_a_stage_is_lost(tmp_path):
    require_gpus(1)
    run = make(tmp_path / "cut", "sft", parallel="pipeline")
    never = CheckpointSpec(every_minutes=None, every_steps=None, keep=3)
    run.spec = replace(run.spec, checkpoint=never, max_steps=5000)
    run.num_ranks = len(NODES)
    ranks = start(run, environs=ENVIRONS, **cut_unevenly(offloads=False))
    try:
        wait_until(lambda: len(run.steps(0)) >= 20, 150.0)
        ranks[1].send_signal(signal.SIGKILL)
        lost_s = time.monotonic()
        codes = [ranks[rank].wait(120) for rank in (0, 2)]
        ended_s = time.monotonic() - lost_s
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [run.journal(rank)[-1].get("message") for rank in (0, 2)]
    print(f"\nended {ended_s:.1f} s after the loss with {codes}: {said}")
    assert all(codes)
    assert ended_s < ENDED_S


def compare(run: Run, one: Run) -> float:
    """Return the largest relative difference of the losses of two runs."""
    found, expected = run.steps(), one.steps()
    assert sorted(found) == sorted(expected) == list(range(1, NUM_STEPS + 1))
    worst = max(abs(found[n]["loss"] / expected[n]["loss"] - 1) for n in expected)
    print(f"\nlargest difference of a loss in {NUM_STEPS} steps: {worst:.1e}")
    return worst

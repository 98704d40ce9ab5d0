"""Ranks on GPUs that survive a loss go on in their processes: NCCL gives up its group, and a new
one is made.

Three ranks play three PCs, on as many GPUs as there are: `python -m pytest -m gpu
tests/agents/trainer/test_regrouping_on_gpus.py`.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.run import RankPlacement
from agents.contract.run_layout import INTERRUPT_FILE
from agents.contract.spec import CheckpointSpec
from tests.agents.trainer.rank.test_loss_on_gpus import SOCKETS
from tests.agents.trainer.ranks import Run, wait_until
from tests.agents.trainer.test_regrouping import NODES, decide, shared, wait_for_survivors, write
from tests.agents.trainer.test_two_gpus import make_run, require_gpus, start, train

pytestmark = pytest.mark.gpu

NUM_STEPS = 100
BACK_S = 10.0
"""Longest time from a loss to the next step, in seconds."""


def make(home: Path) -> Run:
    run = make_run(home, len(NODES), precision="fp32", compile="off", rebalance=False)
    never = CheckpointSpec(every_minutes=None, every_steps=None, keep=3)
    run.spec = replace(run.spec, checkpoint=never, max_steps=NUM_STEPS)
    return run


def placed() -> dict[str, object]:
    """Return the changes to the intent that make each rank one of its own node."""
    import torch

    count = torch.cuda.device_count()
    places = tuple(
        RankPlacement(rank=rank, local_rank=0, node=node, device=f"cuda:{rank % count}")
        for rank, node in enumerate(NODES)
    )
    return {**shared(), "node": NODES[0], "ranks": places}


# Else NCCL takes several ranks on one GPU for an error.
ENVIRONS = [{**SOCKETS, "NCCL_HOSTID": f"pc-{node}"} for node in NODES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that lost nobody."""
    require_gpus(1)
    run = make(tmp_path_factory.mktemp("whole"))
    train(run, environs=ENVIRONS, **placed())
    return run


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        pytest.param(2, signal.SIGKILL, id="killed"),
        pytest.param(0, signal.SIGKILL, id="killed with the store"),
        pytest.param(1, signal.SIGSTOP, id="silent"),
    ],
)
def test_survivors_go_on_over_nccl(tmp_path, whole, lost, how):
    run = make(tmp_path)
    ranks = start(run, environs=ENVIRONS, **placed())
    left = [rank for rank in range(len(NODES)) if rank != lost]
    try:
        wait_until(lambda: all(len(run.steps(rank)) >= 20 for rank in left), 150.0)
        lost_s = time.time()
        ranks[lost].send_signal(how)
        if how == signal.SIGSTOP:
            time.sleep(1.0)
            write(run.attempt_folder / INTERRUPT_FILE, {"generation": 0})
        wait_for_survivors(run, *left)
        decide(run, *(NODES[rank] for rank in left))
        codes = [ranks[rank].wait(120) for rank in left]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], run.read_log(left[0])
    for rank in left:
        (line,) = (line for line in run.journal(rank) if line["kind"] == "regrouped")
        assert line["lost_nodes"] == [NODES[lost]]
        after = run.steps(rank)[line["step"] + 1]
        print(f"rank {rank}: {after['time_s'] - lost_s:.1f} s from the loss to the next step")
        assert after["time_s"] - lost_s < BACK_S
    lines = [line for line in run.journal(left[0]) if line["kind"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    expected = whole.steps()
    assert all(line["samples"] == expected[line["step"]]["samples"] for line in lines)
    before = [line for line in lines if line["step"] <= 50]
    worst = max(abs(x["loss"] / expected[x["step"]]["loss"] - 1) for x in before)
    print(f"largest difference of a loss in 50 steps: {worst:.1e}")
    assert worst < 1e-3

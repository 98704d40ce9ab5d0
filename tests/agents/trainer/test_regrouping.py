"""Ranks that survive a loss go on in their processes, as the ranks of a new group."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.regroup import Regroup
from agents.contract.run import ElectionPlan, RankPlacement
from agents.contract.run_layout import CLOSED_FILE, INTERRUPT_FILE, LOSS_FILE, REGROUP_FILE
from agents.contract.spec import CheckpointSpec
from agents.contract.wire import to_wire
from agents.trainer.regrouping import WAIT_S
from tests.agents.trainer.ranks import Run, finish, free_port, make_spec, wait_until

NODES = ("a", "b", "c")
SPEC = make_spec(
    max_steps=40,
    evaluate_every_steps=5,
    checkpoint=CheckpointSpec(every_minutes=None, every_steps=10, keep=9, copies=1),
)
BACK_S = 5.0
"""Longest time from a loss to the next step, in seconds."""


def shared() -> dict[str, object]:
    """Return what makes three ranks of this PC those of three nodes that may decide."""
    ports = {node: free_port() for node in NODES}
    places = [
        RankPlacement(rank=rank, local_rank=0, node=node, device="cpu")
        for rank, node in enumerate(NODES)
    ]
    return {
        "ranks": tuple(places),
        "election": ElectionPlan(ports=ports, patience_s=60, per_hour=6),
    }


def write(path: Path, value: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


def decide(run: Run, *nodes: str, generation: int = 1) -> None:
    """Say which nodes go on, as the processes beside the supervisors do."""
    found = Regroup(generation=generation, nodes=nodes, address="127.0.0.1", port=free_port())
    write(run.attempt_folder / REGROUP_FILE, to_wire(found))


def phase(run: Run, rank: int) -> str:
    return str(json.loads((run.attempt_folder / f"rank-{rank}.heartbeat").read_text())["phase"])


def wait_for_survivors(run: Run, *ranks: int) -> None:
    wait_until(lambda: all(phase(run, rank) == "regrouping" for rank in ranks), 20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """Return a run that lost nobody."""
    run = Run(tmp_path_factory.mktemp("whole"), tiny_model, SPEC, 3)
    run.train_to_end()
    return run


def require_same_training(run: Run, whole: Run, *ranks: int) -> None:
    """Check that no sample was lost or doubled, and that losses differ by rounding alone."""
    for rank in ranks:
        lines = [line for line in run.journal(rank) if line["kind"] == "step"]
        assert [line["step"] for line in lines] == list(range(1, SPEC.max_steps + 1))
        for line in lines:
            expected = whole.steps()[line["step"]]
            assert line["samples"] == expected["samples"]
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_two_of_three_ranks_go_on_and_their_checkpoints_resume(tmp_path, tiny_model, whole):
    run = Run(tmp_path, tiny_model, SPEC, 3)
    ranks = run.start(**shared())
    wait_until(lambda: len(run.steps(1)) >= 12)
    # Its PC shuts down; with it go the store, and who wrote checkpoints.
    os.kill(ranks[0].pid, signal.SIGTERM)
    lost_s = time.time()
    wait_for_survivors(run, 1, 2)
    decide(run, "b", "c")
    assert finish(ranks) == [-signal.SIGTERM, 0, 0], run.read_log(1)
    require_same_training(run, whole, 1, 2)
    (line,) = (line for line in run.journal(1) if line["kind"] == "regrouped")
    assert (line["generation"], line["nodes"]) == (1, ["b", "c"])
    assert (line["lost_nodes"], line["lost_ranks"]) == (["a"], [0])
    after = run.steps(1)[line["step"] + 1]
    assert after["time_s"] - lost_s < BACK_S
    assert len(after["shares"]) == 2
    saved = {one["step"]: one["copies"] for one in run.journal(1) if one["kind"] == "checkpoint"}
    assert saved == {20: 1, 30: 1, 40: 1}, "the first rank that is left writes"
    # The last one is that of a run which lost nobody, and a resume goes on from one before.
    run.num_ranks = 1
    run.train_to_end(resume_step=30)
    for step, line in run.steps().items():
        assert line["loss"] == pytest.approx(whole.steps()[step]["loss"], rel=1e-6)


def test_ranks_that_wait_for_a_silent_one_are_freed_and_go_on(tmp_path, tiny_model, whole):
    """With streamed weights, of which every rank holds all."""
    run = Run(tmp_path, tiny_model, replace(SPEC, parallel="streamed"), 3)
    ranks = run.start(**shared(), node="a")
    wait_until(lambda: len(run.steps(1)) >= 6)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    try:
        write(run.attempt_folder / INTERRUPT_FILE, {"generation": 0})
        wait_for_survivors(run, 0, 2)
        decide(run, "a", "c")
        wait_until(lambda: not ranks[0].is_alive() and not ranks[2].is_alive(), 30)
        require_same_training(run, whole, 0, 2)
        # The third one wakes up in a group that is no more: it saves what it holds, and ends.
        os.kill(ranks[1].pid, signal.SIGCONT)
    finally:
        assert finish(ranks, 20) == [0, 3, 0]
    assert max(run.steps(1)) < 10


@pytest.mark.parametrize("decision", [LOSS_FILE, CLOSED_FILE, "without it", "recovery: resume"])
def test_ranks_that_may_not_go_on_save_and_end(tmp_path, tiny_model, decision):
    recovery = "resume" if decision == "recovery: resume" else "auto"
    run = Run(tmp_path, tiny_model, replace(SPEC, recovery=recovery), 3)
    ranks = run.start(**shared())
    wait_until(lambda: len(run.steps(1)) >= 3)
    os.kill(ranks[2].pid, signal.SIGKILL)
    if recovery == "auto":
        wait_for_survivors(run, 0, 1)
        if decision == "without it":
            decide(run, "c")
        else:
            write(run.attempt_folder / decision, {})
    # Long before they would give up by themselves.
    assert finish(ranks, WAIT_S / 2) == [3, 3, -signal.SIGKILL]
    assert "lost its connection to" in run.journal(0)[-1]["message"]
    (saved,) = (run.folder / "checkpoints").glob("step-*")
    assert int(saved.name[-8:]) >= max(run.steps(0)) - 1

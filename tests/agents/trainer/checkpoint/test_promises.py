"""The three promises of a resume, each with its tests, never blurred.

A. The same checkpoint on the same devices in the same order with the same versions: every loss and
   the state after every step are equal to the last bit.
B. Any number of ranks: the same samples in the same order, none twice and none left out; losses
   differ by the order of sums only.
C. Whatever ends a run at whatever instant, its newest checkpoint is whole and can be resumed from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from agents.contract.spec import AdapterSpec, CheckpointSpec, RunSpec
from agents.node.checkpoints import list_checkpoints, verify
from agents.state import Home
from agents.trainer.checkpoint.folder import read_checkpoint
from agents.trainer.checkpoint.sharded_files import read_shards
from agents.trainer.checkpoint.state import ADAPTER_FILE, read_resume_point
from tests.agents.small_disk import fill, small_disk
from tests.agents.trainer.ranks import (
    Run,
    finish,
    make_spec,
    run_trainer,
    start,
    terminate,
    wait_until,
)
from tests.draws import seed

NUM_STEPS = 8
HALF = NUM_STEPS // 2
MADE_BY_STEP = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")
FAILPOINTS = ("files-written", "file-synced:2", "manifest-written", "renamed", "hidden")


def long_spec(**changes) -> RunSpec:
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=HALF, keep=9)
    return make_spec(max_steps=NUM_STEPS, checkpoint=checkpoint, **changes)


def copy_half(run: Run, home: Path) -> Run:
    """Return another run that has only the first half of this one."""
    half = Run(home, run.model, run.spec, run.num_ranks)
    half.attempt = run.attempt
    shutil.copytree(run.checkpoint(HALF), half.checkpoint(HALF))
    return half


def file_hashes(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in MADE_BY_STEP}


def hex_losses(run: Run, attempt: int, rank: int = 0) -> dict[int, tuple[str, str]]:
    return {
        step: (line["loss_hex"], line["samples"]) for step, line in run.steps(rank, attempt).items()
    }


# ---------------------------------------------------------------- A: to the last bit


@pytest.mark.parametrize(
    ("num_ranks", "spec"),
    [
        (1, long_spec()),
        (3, long_spec(shares=(7.0, 5.0, 3.0))),
        (3, long_spec(precision="fp64")),  # measured shares, remembered in the checkpoint
        (2, long_spec(adapter=AdapterSpec(kind="full"), weight_decay=0.1)),
    ],
    ids=["one-rank", "given-shares", "measured-shares", "full"],
)
def test_promise_a_a_resume_is_exact_to_the_last_bit(tmp_path, tiny_model, num_ranks, spec):
    straight = Run(tmp_path / "straight", tiny_model, spec, num_ranks)
    straight.train_to_end()
    half = copy_half(straight, tmp_path / "half")
    half.train_to_end(resume_step=HALF)

    expected = hex_losses(straight, 1)
    assert list(expected) == list(range(1, NUM_STEPS + 1))
    second_half = {step: expected[step] for step in range(HALF + 1, NUM_STEPS + 1)}
    for rank in range(num_ranks):
        assert hex_losses(half, 2, rank) == second_half
    if spec.adapter.kind == "lora":
        made = file_hashes(straight.checkpoint(NUM_STEPS))
        assert file_hashes(half.checkpoint(NUM_STEPS)) == made
        assert file_hashes(straight.checkpoint(HALF)) != made
    else:
        name = "model.safetensors"
        both = [run.checkpoint(NUM_STEPS) / name for run in (straight, half)]
        assert both[0].read_bytes() == both[1].read_bytes()


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(
    "spec",
    [
        long_spec(adapter=AdapterSpec(kind="qlora", rank=4, dropout=0.1)),
        long_spec(optimizer="adamw_8bit", adapter=AdapterSpec(rank=64)),
    ],
    ids=["qlora", "adamw-8bit"],
)
def test_promise_a_holds_for_quantized_weights_and_states(tmp_path, tiny_wide_model, spec):
    straight = Run(tmp_path / "straight", tiny_wide_model, spec)
    straight.train_to_end()
    half = copy_half(straight, tmp_path / "half")
    half.train_to_end(resume_step=HALF)
    made = [file_hashes(run.checkpoint(NUM_STEPS)) for run in (straight, half)]
    assert made[0] == made[1]


def test_promise_a_holds_from_a_stop_at_any_step(tmp_path, tiny_model):
    endless = CheckpointSpec(every_minutes=None, every_steps=None)
    spec = make_spec(max_steps=300, checkpoint=endless, shares=(2.0, 1.0))
    run = Run(tmp_path / "run", tiny_model, spec, 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 3)
    terminate(ranks[1:])  # one rank is asked; all agree
    assert finish(ranks) == [0, 0]
    ends = [line for rank in (0, 1) for line in run.journal(rank) if line["kind"] == "finished"]
    assert [line["reason"] for line in ends] == ["stopped", "stopped"]
    step = ends[0]["step"]
    assert ends[1]["step"] == step == max(run.steps())
    assert read_checkpoint(run.checkpoint(step)).verify() == ""

    ranks = run.start(resume_step=step)
    wait_until(lambda: len(run.steps()) >= 3)
    terminate(ranks)
    assert finish(ranks) == [0, 0]
    assert min(run.steps()) == step + 1

    straight = Run(tmp_path / "straight", tiny_model, spec, 2)
    ranks = straight.start()
    wait_until(lambda: len(straight.steps()) >= step + 3)
    terminate(ranks)
    assert finish(ranks) == [0, 0]
    resumed, expected = hex_losses(run, 2), hex_losses(straight, 1)
    both = resumed.keys() & expected.keys()
    assert len(both) >= 3
    assert {done: resumed[done] for done in both} == {done: expected[done] for done in both}


# ---------------------------------------------------------------- B: the same samples


def test_promise_b_fewer_ranks_see_the_same_samples(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, long_spec(precision="fp64"), 3)
    run.train_to_end()
    half = copy_half(run, tmp_path / "half")
    half.num_ranks = 2
    half.train_to_end(resume_step=HALF)
    again = half.steps(attempt=2)
    assert list(again) == [5, 6, 7, 8]
    for step, line in again.items():
        expected = run.steps(attempt=1)[step]
        assert line["samples"] == expected["samples"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)


def test_promise_b_two_then_three_then_one_rank_see_the_rows_of_one_run(tmp_path, tiny_model):
    spec = make_spec(precision="fp64", max_steps=6)
    straight = Run(tmp_path / "straight", tiny_model, spec)
    straight.train_to_end()
    run = Run(tmp_path / "run", tiny_model, spec, 2)
    run.train_to_end()
    for num_ranks, step in ((3, 2), (1, 4)):
        for later in range(step + 2, 7, 2):
            shutil.rmtree(run.checkpoint(later))
        run.num_ranks = num_ranks
        run.train_to_end(resume_step=step)
    found = {s: line for attempt in (1, 2, 3) for s, line in run.steps(0, attempt).items()}
    assert [len(run.steps(0, attempt)) for attempt in (1, 2, 3)] == [6, 4, 2]
    expected = straight.steps()
    assert list(found) == list(expected)
    for step, line in found.items():
        assert line["samples"] == expected[step]["samples"]
        assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-9)


# ---------------------------------------------------------------- C: always resumable


def keep_rank(environ: dict[str, str], pid_file: str) -> None:
    """Be what a supervisor is to a rank: its parent, in a session of its own."""
    os.setsid()
    pid = os.fork()
    if pid == 0:
        run_trainer(environ)
    Path(pid_file).write_text(str(pid))
    os._exit(0 if os.waitpid(pid, 0)[1] == 0 else 1)


def check_newest(run: Run) -> int | None:
    """Verify and load the newest checkpoint that the agent lists; return its step."""
    home = Home(run.home)
    listed = list_checkpoints(home, "r1")
    if not listed:
        return None
    step = listed[-1].step
    assert verify(home, "r1", step).verified, listed[-1]
    checkpoint = read_checkpoint(run.checkpoint(step))
    assert read_resume_point(checkpoint).step == step
    for name in (ADAPTER_FILE, "optimizer.safetensors"):
        assert dict(read_shards([checkpoint.path / name]))
    return step


def kill_ranks(run: Run, num_kills: int) -> int:
    """Start, kill, check, resume, again and again; return the last step that was saved."""
    draw = random.Random(seed(num_kills))
    step: int | None = None
    for number in range(num_kills):
        run.intend(resume_step=step)
        pid_file = run.attempt_folder / "pid"
        environ = {"RACKLESS_ATTEMPT_DIR": str(run.attempt_folder), "OMP_NUM_THREADS": "1"}
        if number % 3 == 0:
            environ["RACKLESS_FAILPOINT"] = draw.choice(FAILPOINTS)
        keeper = start(keep_rank, environ, str(pid_file))
        wait_until(lambda file=pid_file: file.exists() and file.read_text() != "")  # type: ignore[misc]
        if number % 3 == 0:
            assert finish([keeper]) == [1]
        else:
            wait_until(lambda: len(run.steps()) >= 3)  # the second save waits for the first
            time.sleep(draw.uniform(0.0, 0.1))
            pids = [keeper.pid, int(pid_file.read_text())]
            for pid in draw.sample(pids, 2):
                assert pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            finish([keeper])
            wait_until(lambda pid=pids[1]: not is_running(pid))  # type: ignore[misc]
        newest = check_newest(run)
        assert (newest or 0) >= (step or 0)
        step = newest
    return step or 0


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def run(tmp_path, tiny_model) -> Run:
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=1, keep=2)
    return Run(tmp_path / "run", tiny_model, make_spec(max_steps=100_000, checkpoint=checkpoint))


def test_promise_c_a_killed_rank_goes_on_from_its_newest_checkpoint(run):
    assert kill_ranks(run, 6) >= 4  # each kill that is no failpoint comes a step further


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_promise_c_three_hundred_kills_lose_nothing(run):
    assert kill_ranks(run, 300) >= 200


def test_promise_c_a_full_disk_pauses_checkpoints_and_not_the_training(tmp_path, tiny_model):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        spec = make_spec(max_steps=4000)
        run = Run(disk / "run", tiny_model, spec)
        ranks = run.start()
        wait_until(lambda: run.checkpoint(2).is_dir())

        def has_failed() -> bool:
            fill(disk, leave_bytes=60_000)  # again: a checkpoint that is removed makes room
            return any(line["kind"] == "checkpoint_failed" for line in run.journal())

        wait_until(has_failed)
        reached = max(run.steps())
        (disk / "filler").unlink()
        wait_until(
            lambda: any(
                line["step"] > reached + 2 for line in run.journal() if line["kind"] == "checkpoint"
            )
        )
        assert ranks[0].pid
        os.kill(ranks[0].pid, signal.SIGTERM)
        assert finish(ranks) == [0]
        warning = next(line for line in run.journal() if line["kind"] == "checkpoint_failed")
        assert "The disk of node here is full" in warning["message"]
        assert warning["hint"]
        left = list((run.folder / "checkpoints").iterdir())
        assert all(path.name.startswith("step-") for path in left)

"""Kill real ranks, and the process that keeps them, at any instant: the run always goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from agents.checkpoints import list_checkpoints, verify
from agents.spec import CheckpointSpec
from agents.state import Home
from agents.trainer.checkpoint import read_checkpoint
from agents.trainer.shards import read_shards
from agents.trainer.snapshot import ADAPTER_FILE, read_progress
from tests.agents.trainer.ranks import Run, finish, make_spec, run_trainer, start, wait_until

FAILPOINTS = ("files-written", "file-synced:2", "manifest-written", "renamed", "hidden")


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
    assert read_progress(checkpoint).step == step
    for name in (ADAPTER_FILE, "optimizer.safetensors"):
        assert dict(read_shards([checkpoint.path / name]))
    return step


def kill_ranks(run: Run, num_kills: int) -> int:
    """Start, kill, check, resume, again and again; return the last step that was saved."""
    draw = random.Random(num_kills)
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


def test_a_killed_rank_goes_on_from_its_newest_checkpoint(run):
    assert kill_ranks(run, 6) >= 4  # each kill that is no failpoint comes a step further


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_three_hundred_kills_lose_nothing(run):
    assert kill_ranks(run, 300) >= 200

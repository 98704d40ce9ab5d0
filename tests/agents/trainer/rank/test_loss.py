"""Ranks that survive a loss save the last completed step, each node for itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.spec import CheckpointSpec
from agents.trainer.checkpoint.folder import read_checkpoint
from agents.trainer.rank.group import PeerLost
from agents.trainer.rank.journal import Heartbeat
from agents.trainer.rank.state_guard import StateGuard
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank, wait_until

# No checkpoint comes by itself.
SPEC = make_spec(
    max_steps=12, checkpoint=CheckpointSpec(every_minutes=None, every_steps=None, keep=3)
)


def newest_checkpoint(run: Run):
    (path,) = (run.folder / "checkpoints").glob("step-*")
    return read_checkpoint(path)


def test_a_killed_rank_costs_one_step_at_most(tmp_path, tiny_model):
    whole = Run(tmp_path / "whole", tiny_model, SPEC, 3)
    whole.train_to_end()
    run = Run(tmp_path / "run", tiny_model, SPEC, 3)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 4)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert finish(ranks) == [3, -signal.SIGKILL, 3]
    done = max(max(run.steps(rank)) for rank in range(3))
    saved = newest_checkpoint(run)
    assert saved.manifest.at_loss
    assert saved.manifest.step in (done - 1, done)
    assert saved.verify() == ""
    told = [line for rank in (0, 2) for line in run.journal(rank) if line["kind"] == "checkpoint"]
    assert [line["at_loss"] for line in told] == [True], "one rank of a node writes"
    # Two ranks go on, as if nothing had happened.
    run.num_ranks = 2
    run.train_to_end(resume_step=saved.manifest.step)
    assert min(run.steps()) == saved.manifest.step + 1
    for step, line in run.steps().items():
        assert line["samples"] == whole.steps()[step]["samples"]
        assert line["loss"] == pytest.approx(whole.steps()[step]["loss"], rel=1e-6)


def test_ranks_that_wait_for_a_silent_one_save_when_asked(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, SPEC, 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 3)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    (run.attempt_folder / "loss.json").write_text("{}")
    try:
        ranks[0].join(30)
        assert ranks[0].exitcode == 3
        assert newest_checkpoint(run).manifest.step >= max(run.steps()) - 1
        assert "lost its connection to" in run.journal()[-1]["message"]
    finally:
        os.kill(ranks[1].pid, signal.SIGKILL)
        finish(ranks)


def stop_before_others_wait(environ: dict[str, str]) -> None:
    """Be a rank that is stopped as it begins to evaluate or to save."""
    os.environ.update(environ)
    from agents.trainer import loop
    from agents.trainer.__main__ import main
    from agents.trainer.checkpoint.saver import Saver

    def stop(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ["STOPS_IN"] == "saving":
        Saver.save = stop  # type: ignore[method-assign]
    else:
        loop.evaluate = stop  # type: ignore[assignment]
    os._exit(main())


@pytest.mark.parametrize("phase", ["evaluating", "saving"])
def test_ranks_that_wait_while_they_evaluate_or_save_say_so_and_save_when_asked(
    tmp_path, tiny_model, phase
):
    saves = CheckpointSpec(every_minutes=None, every_steps=2 if phase == "saving" else None, keep=3)
    spec = replace(SPEC, evaluate_every_steps=2, checkpoint=saves)
    run = Run(tmp_path / "run", tiny_model, spec, 2)
    evaluated = str(run.train) if phase == "evaluating" else None
    intent, folder = run.intend(eval_path=evaluated), run.attempt_folder
    ranks = [
        start_rank(intent, 0, folder, {}),
        start_rank(intent, 1, folder, {"STOPS_IN": phase}, stop_before_others_wait),
    ]

    def waits_s() -> float:
        beat = json.loads((folder / "rank-0.heartbeat").read_text())
        since_s = beat["waits_since_s"]
        return time.monotonic() - since_s if beat["phase"] == phase and since_s else 0.0

    try:
        wait_until(lambda: len(run.steps()) >= 2)
        wait_until(lambda: waits_s() > Heartbeat.PERIOD_S + 0.5)
        (folder / "loss.json").write_text("{}")
        ranks[0].join(30)
        assert ranks[0].exitcode == 3
        assert newest_checkpoint(run).manifest.step == 2
    finally:
        finish(ranks, 0)


def test_lossy_compression_says_why_it_saves_nothing(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, replace(SPEC, compression="bf16"), 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 2)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert finish(ranks) == [3, -signal.SIGKILL]
    (warning,) = (line for line in run.journal() if line["kind"] == "warning")
    assert "compression: bf16" in warning["message"]
    assert not list((run.folder / "checkpoints").glob("step-*"))


def test_a_seized_state_changes_no_more():
    guard = StateGuard("rank 1")
    with guard.changing():
        thread = threading.Thread(target=guard.seize, args=(0.0,))
        thread.start()
        thread.join()
    with guard.changing():
        pass  # it came too late to seize
    assert guard.seize(0.0)
    with pytest.raises(PeerLost, match="rank 1 lost its connection"), guard.changing():
        pass


def test_a_state_is_not_whole_after_a_change_that_failed():
    guard = StateGuard()
    with pytest.raises(ZeroDivisionError), guard.changing():
        1 / 0  # noqa: B018
    assert not guard.seize(0.0)


def write_slowly(environ: dict[str, str]) -> None:
    """Be a rank whose commits take two seconds more, and leave a file when the first begins."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.checkpoint.folder import CheckpointFolder

    check = CheckpointFolder._check_fence

    def wait_and_check(self: CheckpointFolder) -> None:
        Path(environ["WRITING"]).touch()
        time.sleep(2.0)
        check(self)

    CheckpointFolder._check_fence = wait_and_check  # type: ignore[method-assign]
    os._exit(main())


def test_a_stage_that_waits_for_a_silent_one_ends_the_checkpoint_that_it_writes(
    tmp_path, tiny_model
):
    saves = CheckpointSpec(every_minutes=None, every_steps=3, keep=3)
    run = Run(tmp_path / "run", tiny_model, replace(SPEC, parallel="pipeline", checkpoint=saves), 2)
    intent, folder = run.intend(), run.attempt_folder
    writing = tmp_path / "writing"
    ranks = [
        start_rank(intent, 0, folder, {"WRITING": str(writing)}, write_slowly),
        start_rank(intent, 1, folder, {}),
    ]
    wait_until(writing.exists)  # what the other stage holds is there, too
    os.kill(ranks[1].pid, signal.SIGSTOP)
    (folder / "loss.json").write_text("{}")
    try:
        ranks[0].join(30)
        assert ranks[0].exitcode == 3
    finally:
        os.kill(ranks[1].pid, signal.SIGKILL)
        finish(ranks)
    saved = newest_checkpoint(run)
    assert (saved.manifest.step, saved.verify()) == (3, "")
    assert not saved.manifest.at_loss
    assert "could not save step 3" not in str(run.journal())

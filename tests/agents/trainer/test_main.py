"""The trainer from outside: its journal, its exit codes, and every way it refuses to begin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib import metadata
from itertools import groupby
from pathlib import Path

import pytest

from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec
from agents.contract.wire import to_wire
from tests.agents.trainer.ranks import (
    FINISH_S,
    Run,
    finish,
    make_rows,
    make_spec,
    read_journal,
    run_trainer,
    start,
    start_rank,
    wait_until,
)

AGENTS = Path(__file__).parents[3] / "agents"


def failure(run: Run, rank: int = 0) -> dict[str, str]:
    last = run.journal(rank)[-1]
    assert last["kind"] == "failed", last
    assert last["hint"]
    return last


def refuse(run: Run, **changes) -> str:
    """Start the next attempt, which has to fail cleanly; return what it says."""
    assert finish(run.start(**changes)) == [3] * run.num_ranks
    assert not (run.folder / "checkpoints").exists()
    assert not run.steps()
    return failure(run)["message"]


@pytest.fixture
def run(tmp_path, tiny_model) -> Run:
    return Run(tmp_path / "run", tiny_model, make_spec())


def test_the_journal_tells_the_whole_story(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(), 2)
    with run.train.open("a") as file:
        file.write("\n")
    evaluation = make_rows(tmp_path / "eval.jsonl", 5)
    run.train_to_end(eval_path=str(evaluation))
    for rank in range(2):
        lines = run.journal(rank)
        kinds = [line["kind"] if line["kind"] != "phase" else line["phase"] for line in lines]
        many = ("step", "eval", "checkpoint", "preview")
        # A phase is told again with its forecast if the other rank has already measured it.
        assert [kind for kind, _ in groupby(kind for kind in kinds if kind not in many)] == [
            "loading", "imported", "setting", "warmup", "started", "training",
            "saving", "training", "evaluating", "training", "saving", "training",
            "finished", "done",
        ]  # fmt: skip
        assert kinds.count("preview") == (1 if rank == 0 else 0)
        assert kinds.count("checkpoint") == (2 if rank == 0 else 0)
        started = next(line for line in lines if line["kind"] == "started")
        assert started["world_size"] == 2
        assert len(started["shares"]) == 2  # weights: equal ranks get 1 each
        assert min(started["shares"]) > 0
        assert started["total_steps"] == 4
        assert started["num_rows"] == 40
        assert started["skipped"] == [{"row": 41, "reason": "the line is empty"}]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        assert [line["step"] for line in evaluations] == [4]
        assert evaluations[0]["loss"] > 0
        for step, line in run.steps(rank).items():
            assert float.fromhex(line["loss_hex"]) == line["loss"]
            assert line["step_s"] >= line["compute_s"] + line["wait_s"] > 0
            assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"])
            assert line["memory_bytes"] > 1 << 20
            assert line["epoch"] == pytest.approx(step * 12 / 40)
        beat = json.loads((run.attempt_folder / f"rank-{rank}.heartbeat").read_text())
        assert (beat["step"], beat["phase"]) == (4, "done")
        log = (run.attempt_folder / f"rank-{rank}.log").read_text().splitlines()
        assert f" rank {rank} of 2 of run r1, attempt 1, on cpu of " in log[0]
        assert f"torch {metadata.version('torch')}" in log[1]
        assert log[-1].endswith(" finished normally")
    assert run.steps(0)[4]["loss"] < run.steps(0)[1]["loss"]
    assert [run.steps(0)[s]["loss_hex"] for s in (1, 4)] == [
        run.steps(1)[s]["loss_hex"] for s in (1, 4)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "dpo"}, "objective dpo needs preference rows"),
        ({"parallel": "sharded"}, "parallel: sharded is not available yet"),
        (
            {"parallel": "streamed", "adapter": AdapterSpec(kind="full")},
            "parallel: streamed keeps frozen weights outside the GPU",
        ),
        ({"shares": (1.0, 2.0)}, "shares has 2 values, but the run has 1 ranks"),
        ({"adapter": AdapterSpec(targets=("q_porj",))}, "'q_porj'"),
    ],
)
def test_what_is_not_supported_is_said(run, changes, words):
    run.spec = replace(run.spec, **changes)
    assert words in refuse(run)


def run_without_bitsandbytes(environ: dict[str, str]) -> None:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # how Python marks a missing one
    run_trainer(environ)


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw_8bit"}, {"adapter": AdapterSpec(kind="qlora")}]
)
def test_a_missing_package_is_named(run, changes):
    run.spec = replace(run.spec, **changes)
    run.intend()
    environ = {"RACKLESS_ATTEMPT_DIR": str(run.attempt_folder)}
    assert finish([start(run_without_bitsandbytes, environ)]) == [3]
    assert "bitsandbytes" in failure(run)["message"]


def test_too_many_broken_lines_end_every_rank_with_the_first_number(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(), 2)
    lines = run.train.read_text().splitlines()
    lines[16:28] = [line[:-3] for line in lines[16:28]]
    run.train.write_text("\n".join(lines))
    message = refuse(run)
    assert (
        f"{run.train.name}: 12 of 40 rows are malformed, the first in row 17: not valid" in message
    )


def test_a_rank_that_cannot_load_ends_the_others_at_once(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(), 3)
    broken = tmp_path / "broken"
    intent = run.intend()
    bad = replace(intent, train_path=str(tmp_path / "none.jsonl"))
    broken.mkdir()
    (broken / "intent.json").write_text(json.dumps(to_wire(bad)))
    started = time.monotonic()
    folders = [run.attempt_folder, broken, run.attempt_folder]
    ranks = [start_rank(intent, rank, folder, {}) for rank, folder in enumerate(folders)]
    assert finish(ranks) == [3, 3, 3]
    assert time.monotonic() - started < 30
    assert read_journal(broken, 1)[-1]["message"] == f"{run.train.name} does not exist."
    for rank in (0, 2):
        message = failure(run, rank)["message"]
        assert "lost its connection to rank 1 (node here, cpu), which failed" in message
        assert f"{run.train.name} does not exist" in message


def test_ranks_with_different_data_are_told_apart(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(), 2)
    intent = run.intend()
    other = tmp_path / "other"
    other.mkdir()
    path = make_rows(tmp_path / "other.jsonl", 41)
    (other / "intent.json").write_text(json.dumps(to_wire(replace(intent, train_path=str(path)))))
    ranks = [start_rank(intent, 0, run.attempt_folder, {}), start_rank(intent, 1, other, {})]
    assert finish(ranks) == [3, 3]
    assert (
        "rank 1 (node here, cpu) holds another training file than rank 0"
        in (failure(run)["message"])
    )


def test_a_killed_rank_ends_the_other_with_a_word_about_it(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=10_000), 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 2)
    assert ranks[1].pid
    os.kill(ranks[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    assert finish(ranks) == [3, -signal.SIGKILL]
    assert time.monotonic() - killed < 10
    assert "rank 0 (node here, cpu) lost its connection" in failure(run)["message"]


def test_other_bad_beginnings(run, tmp_path, tiny_model):
    assert "no_model does not exist" in refuse(run, model_path=str(tmp_path / "no_model"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty has no config.json" in refuse(run, model_path=str(empty))
    run.train.write_text("")
    assert "is empty" in refuse(run)
    run.intend()
    (run.attempt_folder / "intent.json").write_text("{}")
    ranks = [start_rank(run_intent(run), 0, run.attempt_folder, {})]
    assert finish(ranks) == [3]
    assert "intent.json cannot be read" in failure(run)["message"]


def run_intent(run: Run):
    other = Run(run.home / "other", run.model, run.spec)
    return other.intend()


def test_fewer_rows_than_ranks_are_trained_with_a_warning(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(batch_sequences=2, max_steps=2), 3)
    make_rows(run.train, 2)
    run.train_to_end()
    warnings = [line["message"] for line in run.journal() if line["kind"] == "warning"]
    assert warnings == ["There are 2 rows for 3 ranks."]
    assert sum(line["tokens"] == 0 for rank in range(3) for line in run.steps(rank).values()) >= 2


def test_a_diverged_training_ends_and_keeps_the_older_checkpoint(tmp_path, tiny_model):
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=1)
    adapter = AdapterSpec(alpha=1e6, rank=1, rslora=True)
    spec = make_spec(learning_rate=1.0, warmup_share=0.0, checkpoint=checkpoint, adapter=adapter)
    run = Run(tmp_path / "run", tiny_model, spec)
    assert finish(run.start()) == [3]
    assert "the training has diverged" in failure(run)["message"]
    assert failure(run)["cause"] == "diverged"
    assert "lower learning rate" in failure(run)["hint"]
    steps = [line["step"] for line in run.journal() if line["kind"] == "step"]
    assert steps
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {
        f"step-{step:08d}" for step in steps[-3:]
    }


def test_the_clock_asks_for_checkpoints(tmp_path, tiny_model):
    checkpoint = CheckpointSpec(every_minutes=0.002, every_steps=None)
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=40, checkpoint=checkpoint), 2)
    run.train_to_end()
    saved = [line["step"] for line in run.journal() if line["kind"] == "checkpoint"]
    assert len(saved) > 2
    assert saved[-1] == 40


def test_torchrun_starts_it_by_hand_from_the_archive(tmp_path, tiny_model):
    archive = tmp_path / "agents.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in AGENTS.rglob("*.py"):
            file.write(path, path.relative_to(AGENTS.parent))
    run = Run(tmp_path / "run", tiny_model, make_spec(data=DataSpec(train="t", format="chat")), 2)
    intent = run.intend()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         f"--master-port={intent.master_port}", "-m", "agents.trainer"],
        env={**os.environ, "PYTHONPATH": str(archive), "GLOO_SOCKET_IFNAME": "lo",
             "RACKLESS_ATTEMPT_DIR": str(run.attempt_folder)},
        cwd=run.attempt_folder,
        capture_output=True,
        check=False,
        timeout=FINISH_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(run.steps(0)) == list(run.steps(1)) == [1, 2, 3, 4]
    assert run.checkpoint(4).is_dir()


def test_a_wrong_number_of_ranks_is_said(run):
    intent = run.intend()
    wide = replace(intent, ranks=(*intent.ranks, *intent.ranks))
    assert finish([start_rank(wide, 0, run.attempt_folder, {})]) == [3]
    assert "is for 1 ranks, but this is rank 0 of 2" in failure(run)["message"]


def test_without_a_folder_it_says_so():
    environ = {k: v for k, v in os.environ.items() if k != "RACKLESS_ATTEMPT_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "agents.trainer"], env=environ, capture_output=True, check=False
    )
    assert done.returncode == 3
    assert b"RACKLESS_ATTEMPT_DIR is not set" in done.stderr

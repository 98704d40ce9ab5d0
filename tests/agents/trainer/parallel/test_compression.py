"""Lossy gradients over real processes: it learns, ranks stay equal, and a resume is exact."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from agents.contract.spec import AdapterSpec, CheckpointSpec
from agents.node.manifest import read_manifest, write_manifest
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank

KINDS = ("bf16", "powersgd")
NUM_STEPS, HALF = 16, 8


def make_run(home, model, kind):
    spec = make_spec(
        compression=kind,
        adapter=AdapterSpec(rank=32, alpha=32, dropout=0.1),
        max_steps=NUM_STEPS,
        schedule="constant",
        learning_rate=1e-2,
        shares=(2.0, 1.0),
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=HALF, keep=9),
    )
    return Run(home, model, spec, 2)


def train_unrepaired(environ):
    """Be a rank that ends when the states of the ranks differ at a checkpoint."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.rank.group import Group

    def refuse(self, tensor):
        raise AssertionError("the ranks hold different states")

    Group.copy_from_first = refuse
    os._exit(main())


def train(run):
    """Train an attempt to its end with ranks that nobody makes equal."""
    intent = run.intend()
    ranks = [
        start_rank(intent, rank, run.attempt_folder, {}, train_unrepaired)
        for rank in range(run.num_ranks)
    ]
    assert finish(ranks) == [0] * run.num_ranks, run.read_log(0)


def losses(run, attempt=None):
    return {step: line["loss_hex"] for step, line in run.steps(attempt=attempt).items()}


@pytest.fixture(scope="module")
def exact(tmp_path_factory, tiny_model):
    """The losses without compression."""
    run = make_run(tmp_path_factory.mktemp("exact") / "run", tiny_model, "none")
    run.train_to_end()
    return [line["loss"] for line in run.steps().values()]


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_stays_equal_and_resumes_to_the_bit(tmp_path, tiny_model, exact, kind):
    run = make_run(tmp_path / "run", tiny_model, kind)
    train(run)
    found = [line["loss"] for line in run.steps().values()]
    assert found[0] == exact[0]
    assert found != exact, "nothing was compressed"
    assert found[-1] == pytest.approx(exact[-1], rel=0.02)
    assert exact[-1] < 0.93 * exact[0]
    carried = load_file(run.checkpoint(HALF) / "carried.safetensors")
    assert carried["kept"].any()
    assert any(name.startswith("right/") for name in carried) == (kind == "powersgd")

    made = (run.checkpoint(NUM_STEPS) / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(run.checkpoint(NUM_STEPS))
    run.train_to_end(resume_step=HALF)
    straight = losses(run, 1)
    assert losses(run) == {step: straight[step] for step in range(HALF + 1, NUM_STEPS + 1)}
    assert (run.checkpoint(NUM_STEPS) / "adapter_model.safetensors").read_bytes() == made


def test_without_what_was_left_over_a_resume_differs(tmp_path, tiny_model):
    """The test above would not notice otherwise."""
    run = make_run(tmp_path / "run", tiny_model, "bf16")
    run.train_to_end()
    shutil.rmtree(run.checkpoint(NUM_STEPS))
    path = run.checkpoint(HALF) / "carried.safetensors"
    told = read_manifest(run.checkpoint(HALF))
    told["files"] = [file for file in told["files"] if file["path"] != path.name]
    write_manifest(run.checkpoint(HALF), told)
    path.unlink()
    run.train_to_end(resume_step=HALF)
    straight = losses(run, 1)
    assert losses(run)[NUM_STEPS] != straight[NUM_STEPS]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_come_and_go(tmp_path, tiny_model, kind):
    """On others, also on one, the losses differ by rounding: what is carried is summed exactly."""
    run = make_run(tmp_path / "run", tiny_model, kind)
    run.train_to_end()
    shutil.rmtree(run.checkpoint(NUM_STEPS))
    straight = run.steps(attempt=1)
    for num_ranks in (3, 1):
        run.num_ranks = num_ranks
        run.spec = replace(run.spec, shares=None)
        run.train_to_end(resume_step=HALF)
        for step, line in run.steps().items():
            assert line["samples"] == straight[step]["samples"]
            assert line["loss"] == pytest.approx(straight[step]["loss"], rel=1e-5)
        carried = load_file(run.checkpoint(NUM_STEPS) / "carried.safetensors")
        assert carried["num_ranks"] == num_ranks
        shutil.rmtree(run.checkpoint(NUM_STEPS))


def test_one_rank_from_the_start_on_compresses_nothing(tmp_path, tiny_model):
    runs = []
    for kind in ("none", "powersgd"):
        run = make_run(tmp_path / kind, tiny_model, kind)
        run.num_ranks = 1
        run.spec = replace(run.spec, shares=None, max_steps=2)
        run.train_to_end()
        runs.append(run)
    assert losses(runs[0]) == losses(runs[1])
    assert not list(runs[1].folder.rglob("carried.safetensors"))

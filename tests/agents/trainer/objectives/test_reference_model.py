"""The table of a full fine-tuning by DPO is made once, and found again by whoever can use it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from agents.contract.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.ranks import Run, finish, make_pairs, make_spec, start_rank

NUM_STEPS, HALF = 4, 2


@pytest.fixture
def run(tmp_path, tiny_model):
    spec = make_spec(
        objective="dpo",
        adapter=AdapterSpec(kind="full"),
        learning_rate=1e-3,
        batch_sequences=4,
        max_steps=NUM_STEPS,
        shares=(2.0, 1.0),
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=HALF, keep=9),
    )
    return prepare_run(Run(tmp_path / "run", tiny_model, spec, 2))


def prepare_run(run):
    make_pairs(run.train)
    return run


def tables(run):
    return sorted((run.home / "cache" / "references").glob("*/table.npy"))


def train_without_asking(environ):
    """Be a rank that ends when it has to ask the reference."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.objectives import reference_model

    def refuse(*args, **options):
        raise AssertionError("the reference is asked again")

    reference_model.compute_reference = refuse
    os._exit(main())


def finish_without_asking(run, **changes):
    intent = run.intend(**changes)
    return finish([
        start_rank(intent, rank, run.attempt_folder, {}, train_without_asking)
        for rank in range(run.num_ranks)
    ])  # fmt: skip


def losses(run, attempt):
    return {step: line["loss_hex"] for step, line in run.steps(attempt=attempt).items()}


def test_a_resume_finds_the_table_and_goes_on_exactly(run):
    run.train_to_end()
    (table,) = tables(run)
    assert np.load(table).shape == (20, 2)
    assert (np.load(table) < 0).any()
    shutil.rmtree(run.checkpoint(NUM_STEPS))
    assert finish_without_asking(run, resume_step=HALF) == [0, 0], run.read_log(0)
    straight = losses(run, 1)
    assert losses(run, 2) == {step: straight[step] for step in (3, 4)}
    # Another run, on one rank and with another learning rate, finds it, too.
    run.num_ranks = 1
    run.spec = replace(run.spec, shares=None, learning_rate=2e-3)
    shutil.rmtree(run.folder / "checkpoints")
    assert finish_without_asking(run) == [0], run.read_log(0)
    assert len(tables(run)) == 1


def test_what_decides_it_makes_another_table_and_a_damaged_one_is_made_anew(run):
    run.num_ranks = 1
    run.spec = replace(run.spec, shares=None)
    run.train_to_end()
    first = losses(run, 1)
    (table,) = tables(run)
    shutil.rmtree(run.folder / "checkpoints")
    table.write_bytes(table.read_bytes()[:100])
    run.train_to_end()
    assert losses(run, 2) == first
    shutil.rmtree(run.folder / "checkpoints")
    run.spec = replace(run.spec, sequence_tokens=32)
    assert finish_without_asking(run) == [1]
    assert "asked again" in run.journal()[-1]["message"]


def test_one_node_that_has_it_is_enough(run, tmp_path, tiny_model):
    run.num_ranks = 1
    run.spec = replace(run.spec, shares=None)
    run.train_to_end()
    shutil.rmtree(run.folder / "checkpoints")
    run.num_ranks = 2
    run.spec = replace(run.spec, shares=(1.0, 2.0))
    other = prepare_run(Run(tmp_path / "other", tiny_model, run.spec, 2))
    other.attempt = run.attempt
    intent = run.intend()
    places = [replace(place, local_rank=0) for place in intent.ranks]
    intent = other.intend(master_port=intent.master_port, ranks=tuple(places))
    shutil.copy(other.attempt_folder / "intent.json", run.attempt_folder / "intent.json")
    ranks = [
        start_rank(intent, rank, folder, {})
        for rank, folder in enumerate((other.attempt_folder, run.attempt_folder))
    ]
    assert finish(ranks) == [0, 0]
    found = [np.load(tables(one)[0]) for one in (run, other)]
    assert np.array_equal(found[0], found[1])

"""Runs with streamed layers are those with resident ones, to the last bit on a CPU."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

from agents.contract.model_cut import ModelCut, Stage
from agents.contract.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.checkpoint.test_promises import file_hashes
from tests.agents.trainer.ranks import (
    Run,
    finish,
    make_environ,
    make_spec,
    make_tiny_model,
    start,
    start_rank,
)

NUM_LAYERS, NUM_STEPS, HALF = 4, 50, 25


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Rows are blocks of 64 values, as NF4 wants them."""
    folder = tmp_path_factory.mktemp("deep")
    return make_tiny_model(folder, num_layers=NUM_LAYERS, hidden_size=64, intermediate_size=128)


def make_run(home, model, kind, num_ranks=1, *, dora=False, **changes):
    adapter = AdapterSpec(kind=kind, rank=4, alpha=8, dropout=0.1, dora=dora)
    spec = make_spec(
        adapter=adapter,
        learning_rate=1e-3,
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=HALF, keep=3),
        **changes,
    )
    return Run(home, model, spec, num_ranks=num_ranks)


def losses(run):
    return [line["loss_hex"] for _, line in sorted(run.steps().items())]


@pytest.fixture(scope="module")
def resident(tmp_path_factory, model):
    run = make_run(tmp_path_factory.mktemp("resident"), model, "lora", max_steps=NUM_STEPS)
    run.train_to_end()
    return run


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, model):
    home = tmp_path_factory.mktemp("streamed")
    run = make_run(home, model, "lora", max_steps=NUM_STEPS, parallel="streamed")
    run.train_to_end()
    return run


def trained_hashes(run, step):
    """Return the hashes of adapter and optimizer; the rest of a checkpoint names the spec."""
    hashes = file_hashes(run.checkpoint(step))
    return [hashes[name] for name in ("adapter_model.safetensors", "optimizer.safetensors")]


def test_fifty_steps_are_those_of_resident_layers(resident, streamed):
    assert len(losses(streamed)) == NUM_STEPS
    assert losses(streamed) == losses(resident)
    (setting,) = (line for line in streamed.journal() if line["kind"] == "setting")
    assert (setting["num_streamed"], setting["num_from_disk"]) == (NUM_LAYERS, 0)
    assert not [line for line in streamed.journal() if line["kind"] == "warning"]


def test_checkpoints_are_the_same_and_continue_either_way(resident, streamed, tmp_path):
    for step in (HALF, NUM_STEPS):
        assert trained_hashes(resident, step) == trained_hashes(streamed, step)
    for run, parallel in ((resident, "streamed"), (streamed, "data")):
        half = Run(tmp_path / parallel, run.model, replace(run.spec, parallel=parallel))
        half.attempt = run.attempt
        shutil.copytree(run.checkpoint(HALF), half.checkpoint(HALF))
        half.train_to_end(resume_step=HALF)
        assert trained_hashes(half, NUM_STEPS) == trained_hashes(run, NUM_STEPS)


def test_uneven_shares_and_ranks_that_hold_all_layers(resident, model, tmp_path):
    """One rank streams and the other has everything, by the plan; shares are 2 : 1."""
    changes = {"max_steps": NUM_STEPS, "parallel": "streamed", "shares": (2.0, 1.0)}
    run = make_run(tmp_path, model, "lora", num_ranks=2, **changes)
    stages = tuple(
        Stage(rank=rank, replica=rank, first_layer=0, stop_layer=NUM_LAYERS, num_resident=number)
        for rank, number in enumerate((None, NUM_LAYERS))
    )
    run.train_to_end(cut=ModelCut(mode="streamed", stages=stages))
    expected = [float.fromhex(loss) for loss in losses(resident)]
    found = [float.fromhex(loss) for loss in losses(run)]
    assert found == pytest.approx(expected, rel=1e-6)
    kinds = [[line for line in run.journal(rank) if "num_streamed" in line] for rank in (0, 1)]
    assert [len(lines) for lines in kinds] == [1, 0]


def test_fifty_steps_with_magnitudes_are_those_of_one_process(model, tmp_path):
    """The lengths of DoRA need the weights of each layer while they are there."""
    changes = {"max_steps": NUM_STEPS, "dora": True}
    plain = make_run(tmp_path / "plain", model, "lora", **changes)
    run = make_run(tmp_path / "run", model, "lora", parallel="streamed", **changes)
    for one in (plain, run):
        one.train_to_end()
    assert len(losses(run)) == NUM_STEPS
    assert losses(run) == losses(plain)
    (setting,) = (line for line in run.journal() if line["kind"] == "setting")
    assert setting["num_streamed"] == NUM_LAYERS


def run_recording(environ: dict[str, str]) -> None:
    """Be a rank that records what it does with layers."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.model import layer_store
    from agents.trainer.streaming.layer_files import StreamedLayerFiles

    def record(module, name):
        usual = getattr(module, name)

        def do(*args):
            with open(environ["RECORD"], "a") as file:
                file.write(f"{name}\n")
            return usual(*args)

        setattr(module, name, do)

    record(StreamedLayerFiles, "write")
    record(layer_store, "fill_block")
    record(layer_store, "check_block")
    os._exit(main())


def train_recording(run):
    """Run the next attempt; return how often its ranks did what is recorded."""
    intent, folder = run.intend(), run.attempt_folder
    record = folder / "record"
    environ = {"RECORD": str(record)}
    ranks = range(run.num_ranks)
    started = [start_rank(intent, one, folder, environ, run_recording) for one in ranks]
    assert finish(started) == [0] * run.num_ranks, run.read_log(0)
    return Counter(record.read_text().split())


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_quantized_layers_are_made_by_one_rank_each_and_kept_for_the_next_run(model, tmp_path):
    plain = make_run(tmp_path / "plain", model, "qlora", max_steps=4, dora=True)
    plain.train_to_end()
    expected = [float.fromhex(loss) for loss in losses(plain)]
    changes = {"max_steps": 4, "dora": True, "parallel": "streamed"}
    run = make_run(tmp_path / "run", model, "qlora", num_ranks=2, **changes)
    # Their memory is one as well: what one rank has put there, the other does not read.
    for once in ({"write": NUM_LAYERS, "fill_block": NUM_LAYERS}, {"check_block": NUM_LAYERS}):
        assert train_recording(run) == once
        found = [float.fromhex(loss) for loss in losses(run)]
        assert found == pytest.approx(expected, rel=1e-6)
    for rank in (0, 1):
        assert [line for line in run.journal(rank, attempt=1) if line.get("phase") == "layers"]


def test_ranks_of_one_pc_hold_one_copy_of_16_bit_layers(resident, model, tmp_path):
    changes = {"max_steps": NUM_STEPS, "parallel": "streamed"}
    run = make_run(tmp_path, model, "lora", num_ranks=2, **changes)
    assert train_recording(run) == {"fill_block": NUM_LAYERS}
    expected = [float.fromhex(loss) for loss in losses(resident)]
    assert [float.fromhex(loss) for loss in losses(run)] == pytest.approx(expected, rel=1e-6)


def run_on_failing_disk(environ: dict[str, str]) -> None:
    """Be a rank with all layers on a disk that reads no more from some step on."""
    os.environ.update(environ)
    from agents.trainer import streamed_store
    from agents.trainer.__main__ import main
    from agents.trainer.loop import Loop
    from agents.trainer.streaming import disk_reader

    do_step = Loop._do_step

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def do(self, step):
        if step == int(environ["FAILING_STEP"]):
            disk_reader.read_piece = fail
        return do_step(self, step)

    Loop._do_step = do
    streamed_store.choose_budget = lambda num_local_ranks: 0
    os._exit(main())


def test_a_disk_that_fails_in_a_step_is_named_and_costs_no_step_before(resident, model, tmp_path):
    run = make_run(tmp_path, model, "lora", max_steps=NUM_STEPS, parallel="streamed")
    environ = {**make_environ(run.intend(), 0, run.attempt_folder), "FAILING_STEP": "6"}
    assert finish([start(run_on_failing_disk, environ)]) == [3]
    lines = run.journal()
    (setting,) = (line for line in lines if line["kind"] == "setting")
    assert setting["num_from_disk"] == NUM_LAYERS
    (failed,) = (line for line in lines if line["kind"] == "failed")
    assert "could not be read from" in failed["message"]
    assert "Input/output error" in failed["message"]
    assert "resume the run" in failed["hint"]
    assert max(run.steps()) == 5
    run.train_to_end(resume_step=5)
    assert losses(run) == losses(resident)[5:]

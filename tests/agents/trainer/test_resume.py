"""2N steps straight are N steps, a resume, and N more: the same to the last bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from agents.errors import UserError
from agents.spec import AdapterSpec, CheckpointSpec, RunSpec
from agents.trainer.checkpoint import read_checkpoint
from agents.trainer.prepare import refuse_other_run
from agents.trainer.snapshot import read_progress
from tests.agents.trainer.ranks import (
    DEMO,
    Run,
    finish,
    make_spec,
    start_rank,
    terminate,
    wait_until,
)

NUM_STEPS = 8
HALF = NUM_STEPS // 2
MADE_BY_STEP = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")


def long_spec(**changes) -> RunSpec:
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=HALF, keep=9)
    return make_spec(max_steps=NUM_STEPS, checkpoint=checkpoint, **changes)


def file_hashes(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in MADE_BY_STEP}


def hex_losses(run: Run, attempt: int, rank: int = 0) -> dict[int, tuple[str, str]]:
    return {
        step: (line["loss_hex"], line["samples"]) for step, line in run.steps(rank, attempt).items()
    }


def copy_half(run: Run, home: Path) -> Run:
    """Return another run that has only the first half of this one."""
    half = Run(home, run.model, run.spec, run.num_ranks)
    half.attempt = run.attempt
    shutil.copytree(run.checkpoint(HALF), half.checkpoint(HALF))
    return half


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
def test_a_resume_is_exact_to_the_last_bit(tmp_path, tiny_model, num_ranks, spec):
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
def test_quantized_weights_and_states_resume_exactly_too(tmp_path, spec):
    straight = Run(tmp_path / "straight", DEMO / "model", spec)  # NF4 wants blocks of 64 values
    straight.train_to_end()
    half = copy_half(straight, tmp_path / "half")
    half.train_to_end(resume_step=HALF)
    made = [file_hashes(run.checkpoint(NUM_STEPS)) for run in (straight, half)]
    assert made[0] == made[1]


def test_a_stop_is_a_checkpoint_that_goes_on_exactly(tmp_path, tiny_model):
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


def test_a_resume_on_fewer_ranks_sees_the_same_samples(tmp_path, tiny_model):
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


def test_every_node_keeps_the_same_bytes(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, long_spec(shares=(1.0, 2.0)), 2)
    intent = run.intend(checkpoint_ranks=(0, 1))
    other = tmp_path / "other" / "runs" / "r1" / "attempts" / "1"
    shutil.copytree(run.attempt_folder, other)
    ranks = [
        start_rank(intent, rank, folder, {})
        for rank, folder in enumerate((run.attempt_folder, other))
    ]
    assert finish(ranks) == [0, 0]
    for step in (HALF, NUM_STEPS):
        name = f"step-{step:08d}"
        both = [
            folder.parent.parent / "checkpoints" / name for folder in (other, run.attempt_folder)
        ]
        manifests = [json.loads((folder / "manifest.json").read_text()) for folder in both]
        assert manifests[0]["files"] == manifests[1]["files"]
        assert len(manifests[0]["files"]) == 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model) -> Run:
    run = Run(tmp_path_factory.mktemp("finished") / "run", tiny_model, long_spec())
    run.train_to_end()
    return run


def test_the_state_holds_no_pickle_and_no_path_of_this_node(finished):
    folder = finished.checkpoint(NUM_STEPS)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
    ]
    for path in folder.glob("*.json"):
        assert str(finished.home) not in path.read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["run_id"], manifest["attempt"], manifest["step"]) == ("r1", 1, NUM_STEPS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0.5}, "learning_rate was 0.01 and is 0.5"),
        ({"adapter": AdapterSpec(rank=4, alpha=8, dropout=0.2)}, "adapter.dropout was 0.1 and is"),
        ({"max_steps": 9}, "max_steps was 8 and is 9"),
    ],
)
def test_other_settings_are_refused_by_name(finished, changes, words):
    checkpoint = read_checkpoint(finished.checkpoint(HALF))
    manifest = checkpoint.manifest
    hashes = {"data_sha256": manifest.data_sha256, "model_sha256": manifest.model_sha256}
    progress = read_progress(checkpoint)
    refuse_other_run(checkpoint, progress, finished.spec, hashes)
    free = replace(finished.spec, name="other", nodes=("a",), shares=(1.0,))
    refuse_other_run(checkpoint, progress, free, hashes)
    with pytest.raises(UserError, match=words):
        refuse_other_run(checkpoint, progress, replace(finished.spec, **changes), hashes)


def test_other_data_and_a_damaged_checkpoint_are_refused(finished, tmp_path):
    run = copy_half(finished, tmp_path / "run")
    with run.train.open("a") as file:
        file.write('{"messages": [{"role": "assistant", "content": "more"}]}\n')
    assert finish(run.start(resume_step=HALF)) == [3]
    failed = run.journal()[-1]
    assert failed["kind"] == "failed"
    assert "content of the training file train.jsonl has changed" in failed["message"]

    path = run.checkpoint(HALF) / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert finish(run.start(resume_step=HALF)) == [3]
    assert "optimizer.safetensors is not what was written" in run.journal()[-1]["message"]

    assert finish(run.start(resume_step=HALF + 1)) == [3]
    assert "is not a complete checkpoint" in run.journal()[-1]["message"]
    assert not run.steps()

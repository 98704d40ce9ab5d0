"""What a checkpoint holds, the same on every node, and what may not be resumed from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer.checkpoint.folder import read_checkpoint
from agents.trainer.checkpoint.resume import refuse_other_run
from agents.trainer.checkpoint.state import read_resume_point
from tests.agents.trainer.checkpoint.test_promises import HALF, NUM_STEPS, copy_half, long_spec
from tests.agents.trainer.ranks import Run, finish, start_rank


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
        ({"weight_decay": 0.5}, "weight_decay was 0.0 and is 0.5"),
        ({"adapter": AdapterSpec(rank=4, alpha=8, dropout=0.2)}, "adapter.dropout was 0.1 and is"),
        ({"max_steps": 9}, "max_steps was 8 and is 9"),
    ],
)
def test_other_settings_are_refused_by_name(finished, changes, words):
    checkpoint = read_checkpoint(finished.checkpoint(HALF))
    manifest = checkpoint.manifest
    hashes = {"data_sha256": manifest.data_sha256, "model_sha256": manifest.model_sha256}
    progress = read_resume_point(checkpoint)
    refuse_other_run(checkpoint, progress, finished.spec, hashes)
    free = replace(finished.spec, name="other", nodes=("a",), learning_rate=0.5)
    refuse_other_run(checkpoint, progress, free, hashes)
    with pytest.raises(ExpectedError, match=words):
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

    path = run.checkpoint(HALF) / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"data_sha256": "', '"data_sha256": "f'))
    assert finish(run.start(resume_step=HALF)) == [3]
    assert "manifest.json cannot be used" in run.journal()[-1]["message"], "not the data's fault"

    assert finish(run.start(resume_step=HALF + 1)) == [3]
    assert "is not a complete checkpoint" in run.journal()[-1]["message"]
    assert not run.steps()

"""Checkpoints of whole models come in files of bounded size, and plain Transformers loads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agents.contract.spec import AdapterSpec, CheckpointSpec
from agents.trainer.checkpoint.folder import read_checkpoint
from agents.trainer.checkpoint.sharded_files import (
    cut_long,
    find_shards,
    group_names,
    join_cut,
    read_shapes,
    read_shards,
    write_shards,
)
from tests.agents.trainer.ranks import Run, finish, make_spec, start

NUM_STEPS, HALF = 6, 3
SHARD_BYTES = 40_000


def make_tensors() -> dict[str, torch.Tensor]:
    whole = torch.arange(60, dtype=torch.float32)  # views of one buffer, as the trainer's are
    return {"a": whole[:10], "b": whole[10:40].view(5, 6), "c": whole[40:], "d": torch.tensor(3.0)}


@pytest.mark.parametrize("shard_bytes", [1, 40, 120, 240, 1000])
def test_what_was_written_is_read_whatever_the_size_of_a_file(tmp_path, shard_bytes):
    tensors = make_tensors()
    write_shards(tensors, tmp_path, "model", shard_bytes)
    files = find_shards(tmp_path, "model")
    found = dict(read_shards(files))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert read_shapes(files) == {name: tuple(t.shape) for name, t in tensors.items()}
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        told = json.loads(index.read_text())
        assert told["metadata"]["total_size"] == 244
        for name, file in told["weight_map"].items():
            assert name in load_file(tmp_path / file)


def test_a_file_holds_as_much_as_fits():
    tensors = make_tensors()
    assert group_names(tensors, 160) == [["a", "b"], ["c", "d"]]
    assert group_names(tensors, 1) == [["a"], ["b"], ["c"], ["d"]]


def test_long_vectors_are_cut_and_joined():
    tensors = {**make_tensors(), "scale": torch.rand(7, dtype=torch.float64)}
    cut = cut_long(tensors, 24)
    assert max(t.nbytes for t in cut.values() if t.dim() == 1) <= 24
    joined = join_cut(iter(sorted(cut.items(), reverse=True)))
    assert sorted(joined) == sorted(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(joined[name], tensor, rtol=0, atol=0)


def run_with_small_files(environ: dict[str, str]) -> None:
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.checkpoint import sharded_files

    sharded_files.SHARD_BYTES = SHARD_BYTES
    os._exit(main())


def losses(run: Run, attempt: int) -> dict[int, str]:
    return {step: line["loss_hex"] for step, line in run.steps(0, attempt).items()}


def test_a_fully_trained_model_is_sharded_loads_elsewhere_and_resumes(tmp_path, tiny_model):
    spec = make_spec(
        adapter=AdapterSpec(kind="full"),
        max_steps=NUM_STEPS,
        learning_rate=1e-3,
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=HALF, keep=9),
    )
    run = Run(tmp_path / "run", tiny_model, spec)
    run.intend()
    environ = {"RACKLESS_ATTEMPT_DIR": str(run.attempt_folder), "OMP_NUM_THREADS": "1"}
    assert finish([start(run_with_small_files, environ)]) == [0], run.read_log(0)

    made = run.checkpoint(NUM_STEPS)
    files = find_shards(made, "model")
    assert len(files) > 2
    assert len(find_shards(made, "optimizer")) > 2
    manifest = read_checkpoint(made).manifest
    listed = {entry.path: entry.size_bytes for entry in manifest.files}
    assert {path.name for path in made.iterdir()} == {*listed, "manifest.json"}
    assert str(tiny_model) not in (made / "config.json").read_text()
    embeddings = 768 * 32 * 4  # one tensor is larger than a file is to be: it has one of its own
    assert sorted(listed[path.name] for path in files)[-2] < SHARD_BYTES + 10_000 < embeddings

    values = dict(read_shards(files))
    elsewhere = AutoModelForCausalLM.from_pretrained(made)
    for name, parameter in elsewhere.named_parameters():
        torch.testing.assert_close(parameter.data, values[name], rtol=0, atol=0)
    assert not torch.equal(
        elsewhere.get_input_embeddings().weight,
        AutoModelForCausalLM.from_pretrained(tiny_model).get_input_embeddings().weight,
    )
    for step in (HALF, NUM_STEPS):
        check_resume(run, step, tmp_path / f"from-{step}")


def check_resume(run: Run, step: int, home: Path) -> None:
    """Go on with files of the usual size; what is left has to be equal to the bit."""
    other = Run(home, run.model, run.spec)
    other.attempt = 1
    shutil.copytree(run.checkpoint(step), other.checkpoint(step))
    other.train_to_end(resume_step=step)
    expected = losses(run, 1)
    assert losses(other, 2) == {s: expected[s] for s in range(step + 1, NUM_STEPS + 1)}
    if step < NUM_STEPS:
        (whole,) = find_shards(other.checkpoint(NUM_STEPS), "model")
        assert whole.name == "model.safetensors"
        values = dict(read_shards(find_shards(run.checkpoint(NUM_STEPS), "model")))
        for name, value in read_shards([whole]):
            torch.testing.assert_close(value, values.pop(name), rtol=0, atol=0)
        assert not values

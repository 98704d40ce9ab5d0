"""The files of a model are read once, and before torch is there."""

import shutil
import subprocess
import sys
import time

import pytest

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer import model_reading
from agents.trainer.checkpoint.fingerprint import hash_model
from agents.trainer.model_reading import start_reading
from agents.trainer.rank.attempt import RankAttempt
from tests.agents.trainer.ranks import Run, make_spec


@pytest.fixture
def begin(tmp_path, tiny_model, monkeypatch):
    """Return a function that starts to read a model, and what it has read ahead."""
    read = []
    monkeypatch.setattr(model_reading, "read_ahead", read.extend)
    model = shutil.copytree(tiny_model, tmp_path / "model")

    def start(rank=0, path=model, **changes):
        run = Run(tmp_path, model, make_spec(**changes), num_ranks=2)
        run.attempt = len([*tmp_path.glob("runs/r1/attempts/*")])
        intent = run.intend(model_path=str(path))
        return start_reading(RankAttempt(folder=run.attempt_folder, intent=intent, rank=rank))

    return start, model, read


def test_files_are_hashed_first_and_read_ahead_from_then_on(begin):
    start, model, read = begin
    assert start().result(10) == hash_model(model, None)
    assert read == []  # hashing has read them
    weights = next(model.glob("*.safetensors"))
    found = start().result(10)
    wait_for(lambda: read == [weights])
    assert found == hash_model(model, None)
    weights.write_bytes(weights.read_bytes() + b"\0")  # changed: hashed again
    read.clear()
    assert start().result(10) == hash_model(model, None) != found
    assert read == []


def wait_for(is_true, seconds=10.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_memory_has_no_room_for_is_not_read_ahead(begin, monkeypatch):
    start, _, read = begin
    start().result(10)
    asked = []
    monkeypatch.setattr(model_reading, "read_available_bytes", lambda: asked.append(1) or 1000)
    start().result(10)
    wait_for(lambda: asked)
    assert read == []


def test_a_model_whose_quantized_layers_are_kept_is_not_read_ahead(begin, monkeypatch):
    start, model, read = begin
    start().result(10)
    asked = []
    monkeypatch.setattr(model_reading, "read_available_bytes", lambda: asked.append(1) or 1 << 40)
    start(parallel="streamed", adapter=AdapterSpec(kind="qlora")).result(10)
    start(parallel="streamed").result(10)
    wait_for(lambda: read == [*model.glob("*.safetensors")])
    assert asked == [1]


def test_one_rank_of_a_node_reads_and_only_what_is_there(begin):
    start, _, _ = begin
    assert start(rank=1) is None
    assert start(path="somebody/a-model") is None


def test_what_cannot_be_read_fails_where_the_hash_is_needed(begin):
    start, model, _ = begin
    (model / "config.json").unlink()
    with pytest.raises(ExpectedError, match=r"config\.json is missing"):
        start().result(10)


def test_it_needs_nothing_that_takes_long_to_import():
    code = (
        "import sys, agents.trainer.model_reading; "
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

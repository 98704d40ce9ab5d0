"""What the numbers depend on is hashed; what they do not depend on may change."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from agents import file_hashes
from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.checkpoint.fingerprint import hash_model, hash_spec, name_differences
from tests.agents.trainer.ranks import make_spec


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_every_byte_of_the_model_counts_and_a_readme_does_not(model):
    before = hash_model(model, None)
    (model / "README.md").write_text("words")
    (model / "manifest.json").write_text("{}")
    assert hash_model(model, None) == before
    (model / "model.safetensors").write_bytes(b"weightz")
    assert hash_model(model, None) != before


def test_a_folder_without_a_model_is_refused(model):
    (model / "config.json").unlink()
    with pytest.raises(ExpectedError, match=r"config\.json is missing"):
        hash_model(model, None)


def test_hashes_are_remembered_until_a_file_changes(model, tmp_path, monkeypatch):
    memory = tmp_path / "hashes"
    first = hash_model(model, memory)
    read = []
    monkeypatch.setattr(
        file_hashes, "hash_file", lambda path, _: read.append(path.name) or "0" * 64
    )
    assert hash_model(model, memory) == first
    assert read == []
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert hash_model(model, memory) != first
    assert read == ["model.safetensors"]


def test_a_memory_that_cannot_be_written_does_no_harm(model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert hash_model(model, blocked / "hashes") == hash_model(model, None)


def test_names_nodes_and_checkpoints_of_a_spec_are_free():
    spec = make_spec()
    same = replace(spec, name="x", nodes=("a",), shares=(1.0,), parallel="data")
    assert hash_spec(same) == hash_spec(spec)
    assert hash_spec(replace(spec, seed=8)) != hash_spec(spec)


def test_differences_are_named_with_both_values():
    then = {"a": 1, "b": {"c": 2, "d": 3}}
    now = {"a": 1, "b": {"c": 4, "d": 3}, "e": None}
    assert name_differences(then, now) == ["b.c was 2 and is 4"]


@pytest.mark.parametrize(
    ("changes", "sha256"),
    [
        ({}, "98505d39a97c032809f107553b9f53bd99287d81ccfe39b961122485f953b230"),
        (
            {"data": DataSpec(train="q", eval="r", format="chat", ignore_columns=("b", "a"))},
            "9e0f659e4103ad444ed29c26077b8a2d13e8664849364ad7f3ab2c794bb59af0",
        ),
        (
            {"adapter": AdapterSpec(experts=True, dropout=0.0)},
            "9a3cb9679a1cefdbc686fedd46dc7a95803a6a0d0a69cbe479c4ed9fe5bef1e7",
        ),
        (
            {"activation_bits": 8},
            "705fac25ceb2549e3142ab95e347b9306644ac1a9bd6ece372b1ac53695913e1",
        ),
        (
            {"objective": "dpo", "shares": (1.0, 2.0), "max_steps": 4, "recovery": "off"},
            "3f991a6eb4de49b95e075b1aefef7bd94a3f1c4bb4eddd12de909b3409991dab",
        ),
    ],
)
def test_checkpoints_of_version_0_1_are_resumed(changes, sha256):
    spec = RunSpec(**{"model": "m", "data": DataSpec(train="t"), **changes})
    assert hash_spec(spec) == sha256, "a later key needs `is_later` in its Key"

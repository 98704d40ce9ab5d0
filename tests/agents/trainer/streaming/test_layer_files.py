"""Layers in files: found again, whole or not at all."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open

from agents.errors import ExpectedError
from agents.trainer.streaming.disk_reader import read_block
from agents.trainer.streaming.layer_files import LayerFiles
from agents.trainer.streaming.layout import BlockLayout, allocate_block, fill_block, make_layout

TENSORS = {
    "a.weight": torch.arange(7, dtype=torch.bfloat16).view(7, 1),
    "a.weight:packed": torch.arange(300, dtype=torch.uint8),
    "offset": torch.tensor(2.5),
}
FACTS = {"a.weight": {"shape": [7, 1]}}


@pytest.fixture
def written(tmp_path):
    files = LayerFiles(tmp_path / "layers", {"model": "1"})
    layout = make_layout(TENSORS, FACTS)
    block = torch.empty(layout.num_bytes, dtype=torch.uint8)
    fill_block(layout, TENSORS, block)
    return files, files.write(3, layout, block), block


def test_a_layer_is_found_as_it_was_written(written):
    files, file, block = written
    found = files.find(3)
    assert found == file
    assert found.start % 4096 == found.layout.num_bytes % 4096 == 0
    target = allocate_block(len(block))
    read_block(found, target)
    for name, tensor in found.layout.view(target).items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.dtype == TENSORS[name].dtype
    with safe_open(found.path, framework="pt") as plain:
        assert torch.equal(plain.get_tensor("layer"), target)
    assert BlockLayout.from_text(file.layout.to_text()) == file.layout


def test_what_is_missing_or_cut_off_or_of_another_model_is_made_again(written, tmp_path):
    files, file, _ = written
    assert files.find(2) is None
    assert LayerFiles(tmp_path / "layers", {"model": "2"}).find(3) is None
    whole = file.path.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"\xff" * 20):
        file.path.write_bytes(content)
        assert files.find(3) is None


def test_a_disk_that_refuses_is_named_and_keeps_nothing(written, tmp_path, monkeypatch):
    files, file, block = written

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ExpectedError, match="layer-0004"):
        files.write(4, file.layout, block)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    assert files.has_room(1)
    assert not files.has_room(1 << 60)


def test_layers_that_nobody_uses_are_removed(written, tmp_path):
    files, file, _ = written
    old = tmp_path / "layers" / "old"
    old.mkdir()
    for folder in (old, file.path.parent):
        os.utime(folder, (0, 0))
    files.mark_used()
    assert file.path.exists()
    assert not old.exists()

"""Layers in files: found again, whole or not at all."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open

from agents.errors import ExpectedError
from agents.trainer.streaming import layer_files
from agents.trainer.streaming.disk_reader import DamagedLayer, check_block, read_block
from agents.trainer.streaming.layer_files import StreamedLayerFiles
from agents.trainer.streaming.layout import BlockLayout, allocate_block, fill_block, make_layout

TENSORS = {
    "a.weight": torch.arange(7, dtype=torch.bfloat16).view(7, 1),
    "a.weight:packed": torch.arange(300, dtype=torch.uint8),
    "offset": torch.tensor(2.5),
}
FACTS = {"a.weight": {"shape": [7, 1]}}


@pytest.fixture
def written(tmp_path):
    files = StreamedLayerFiles(tmp_path / "layers", {"model": "1"})
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
    check_block(found, target)
    for name, tensor in found.layout.view(target).items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.dtype == TENSORS[name].dtype
    with safe_open(found.path, framework="pt") as plain:
        assert torch.equal(plain.get_tensor("layer"), target)
    assert BlockLayout.from_text(file.layout.to_text()) == file.layout


def test_what_is_missing_or_cut_off_or_of_another_model_is_made_again(written, tmp_path):
    files, file, _ = written
    assert files.find(2) is None
    assert StreamedLayerFiles(tmp_path / "layers", {"model": "2"}).find(3) is None
    whole = file.path.read_bytes()
    other = whole.replace(b"[7, 1]", b"[1, 7]", 1)
    assert other != whole
    for content in (whole[:-1], whole[:100], b"", b"\xff" * 20, other):
        file.path.write_bytes(content)
        assert files.find(3) is None


def test_one_bit_that_a_disk_has_changed_is_noticed(written, monkeypatch):
    monkeypatch.setattr(layer_files, "PIECE_BYTES", 4096)
    files, file, block = written
    files.write(3, file.layout, block)
    content = bytearray(file.path.read_bytes())
    content[file.start + 300] ^= 4
    file.path.write_bytes(content)
    found = files.find(3)
    read_block(found, target := allocate_block(len(block)))
    with pytest.raises(DamagedLayer, match=f"in {file.path} is not what was written") as caught:
        check_block(found, target)
    assert caught.value.hint


def test_a_disk_that_refuses_is_named_and_keeps_nothing(written, tmp_path, monkeypatch):
    files, file, block = written

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ExpectedError, match="layer-0004"):
        files.write(4, file.layout, block)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    files.prepare(1)
    with pytest.raises(ExpectedError, match=r"needs [0-9.]+ GiB, with 4 to spare") as caught:
        files.prepare(1 << 60)
    assert caught.value.hint == "Free space on that disk"
    (tmp_path / "file").touch()
    with pytest.raises(ExpectedError, match="keeping layers in"):
        StreamedLayerFiles(tmp_path / "file", {}).prepare(1)


def test_what_nobody_uses_or_finished_is_removed(written, tmp_path):
    files, file, _ = written
    old = tmp_path / "layers" / "old"
    old.mkdir()
    (old.parent / "gone").symlink_to("nowhere")
    killed, writing = (file.path.with_name(f".partial-3.{pid}.1") for pid in (1, 2))
    for path in (killed, writing):
        path.write_bytes(b"part of a layer")
    for path in (old, file.path.parent, killed):
        os.utime(path, (0, 0))
    files.mark_used()
    files.prepare(1)
    assert file.path.exists()
    assert writing.exists()
    assert not old.exists()
    assert not killed.exists()

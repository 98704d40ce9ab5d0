"""Ranks of one PC hold one copy of a block, which is gone with the last of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from agents.trainer.streaming.shared_blocks import join_blocks
from tests.agents.trainer.ranks import finish, start

PLACES, SLOT_BYTES, BUDGET_BYTES = (3, 5, 8), 10_000, 1 << 40


def be_other_rank(path: str, ready: str, end: str) -> None:
    """Fill a block, and stay until told to end."""
    blocks = join_blocks(Path(path), PLACES, SLOT_BYTES, lambda: BUDGET_BYTES)
    block = blocks.take(5, 9000)
    block.copy_(torch.arange(9000) % 251)
    blocks.mark_filled(5)
    Path(ready).touch()
    while not Path(end).exists():
        time.sleep(0.01)


@pytest.fixture
def other(tmp_path):
    """Start another rank that has made the memory; return the file that names it."""
    path, ready, end = (tmp_path / name for name in ("layers.json", "ready", "end"))
    process = start(be_other_rank, str(path), str(ready), str(end))
    while not ready.exists():
        assert process.is_alive()
        time.sleep(0.01)
    yield path
    end.touch()
    assert finish([process]) == [0]


def test_what_one_rank_fills_is_what_another_uses(other):
    blocks = join_blocks(other, PLACES, SLOT_BYTES, lambda: pytest.fail("it is there"))
    assert blocks.budget_bytes == BUDGET_BYTES
    assert [blocks.is_filled(place) for place in PLACES] == [False, True, False]
    block = blocks.take(5, 9000)
    assert torch.equal(block, (torch.arange(9000) % 251).to(torch.uint8))
    assert block.data_ptr() % 4096 == blocks.first_page.data_ptr() % 4096 == 0
    third = blocks.take(8, 12_288)
    third.fill_(7)
    blocks.mark_filled(8)
    again = join_blocks(other, PLACES, SLOT_BYTES, lambda: 0)
    assert again.is_filled(8)
    assert torch.equal(again.take(8, 12_288), third)
    assert int(blocks.take(3, 12_288).max()) == 0, "slots do not overlap"
    assert blocks.take(3, 12_289) is None, "a slot is no larger"
    # Ranks that stream other layers have their own memory.
    assert join_blocks(other, (3, 5), SLOT_BYTES, lambda: 0) is None
    assert join_blocks(other, PLACES, 2 * SLOT_BYTES, lambda: 0) is None


def refuse(*args):
    raise PermissionError(1, "Operation not permitted")


def test_memory_of_processes_that_ended_is_made_anew(tmp_path, monkeypatch):
    path = tmp_path / "layers.json"
    first = join_blocks(path, PLACES, SLOT_BYTES, lambda: 1)
    first.mark_filled(3)
    about = json.loads(path.read_bytes())
    # No such descriptor; no such process; another file has the number by now.
    with (tmp_path / "file").open("w") as file:
        for gone in ({"file": 10_000}, {"pid": 2**30}, {"file": file.fileno()}):
            path.write_text(json.dumps({**about, **gone}))
            assert not join_blocks(path, PLACES, SLOT_BYTES, lambda: 2).is_filled(3)
    for damaged in (b"", b"{"):
        path.write_bytes(damaged)
        assert join_blocks(path, PLACES, SLOT_BYTES, lambda: 3).budget_bytes == 3
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert join_blocks(path, PLACES, SLOT_BYTES, lambda: 4).budget_bytes == 3, "it is there still"
    path.unlink()
    assert join_blocks(path, PLACES, SLOT_BYTES, lambda: 4) is None
    assert join_blocks(tmp_path / "missing" / "layers.json", PLACES, SLOT_BYTES, lambda: 4) is None


def test_only_what_is_filled_takes_memory(tmp_path):
    size = 1 << 20
    blocks = join_blocks(tmp_path / "layers.json", range(1000), 4 * size, lambda: 0)
    for place in (7, 999):
        blocks.take(place, size).fill_(1)
    assert 2 * size <= 512 * os.fstat(blocks._file).st_blocks < 3 * size

"""Ranks of one PC make each layer once, and none waits for one that died or hangs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from agents.trainer.streaming import layer_turns
from agents.trainer.streaming.layer_files import StreamedLayerFiles
from agents.trainer.streaming.layer_turns import LayerClaims, take_turns
from agents.trainer.streaming.layout import fill_block, make_layout

# Another rank, as the kernel knows it: a process with locks.
_CLAIM = """
import fcntl, sys
file = open(sys.argv[1], "w")
for place in sys.argv[2:]:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(place))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files(tmp_path):
    found = StreamedLayerFiles(tmp_path, {})
    found.claims_path.parent.mkdir()
    return found


def make(files, place):
    tensors = {"weight": torch.full((5,), float(place))}
    layout = make_layout(tensors, {})
    block = torch.empty(layout.num_bytes, dtype=torch.uint8)
    fill_block(layout, tensors, block)
    files.write(place, layout, block)


@contextmanager
def other_rank(files, *places):
    """Let another process claim layers."""
    argv = [sys.executable, "-I", "-c", _CLAIM, str(files.claims_path), *map(str, places)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"claimed\n"
            yield process
        finally:
            process.kill()


def do_turns(files, share=0.0, report=lambda done, total: None, is_kept=lambda place: True):
    """Make what is missing; return the layers in order, each with whether it was made."""
    found = []
    claims = LayerClaims(files.claims_path)

    def is_there(place):
        return files.find(place) is not None

    for place in take_turns(claims, range(6), share, is_kept, is_there, report):
        is_missing = is_kept(place) and files.find(place) is None
        if is_missing:
            make(files, place)
        found.append((place, is_missing))
    return found


def test_a_rank_makes_what_is_missing_before_it_reads_what_is_there(files):
    for place in (0, 4):
        make(files, place)
    reports = []
    found = do_turns(files, 0.5, report=lambda *counts: reports.append(counts))
    assert found == [(3, True), (5, True), (1, True), (2, True), (4, False), (0, False)]
    assert reports == [(done, 6) for done in range(7)]
    assert do_turns(files) == [(place, False) for place in range(6)]


def test_what_another_rank_makes_is_waited_for_and_what_it_leaves_at_its_death_is_made(files):
    waits = []
    with other_rank(files, 1, 2) as process:

        def report(done, total):
            waits.append(done)
            if waits.count(4) == 3:  # all but those of the other rank
                make(files, 1)
                process.kill()
                process.wait()

        found = do_turns(files, report=report)
    assert [place for place, _ in found[:4]] == [0, 3, 4, 5]
    # One was whole when the other rank died, the second had not been written.
    assert sorted(found[4:]) == [(1, False), (2, True)]
    assert waits[-1] == 6


def test_a_rank_that_hangs_is_not_waited_for_without_end(files, monkeypatch):
    monkeypatch.setattr(layer_turns, "_PATIENCE_S", 0.3)
    with other_rank(files, 0):
        found = do_turns(files)
    assert found == [(place, True) for place in (1, 2, 3, 4, 5, 0)]


def test_layers_that_are_not_kept_wait_for_nobody(files):
    with other_rank(files, *range(6)):
        found = do_turns(files, is_kept=lambda place: False)
        assert found == [(place, False) for place in range(6)]
        assert not LayerClaims(files.claims_path).take(0)
    # Where nothing can be written, each rank makes all layers for itself.
    claims = LayerClaims(files.claims_path / "in a file")
    assert claims.take(0)
    claims.close()

"""A full disk of one node is told once, fills no other, pauses the end of a run, and loses none."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import CheckpointSpec
from agents.contract.wire import to_wire
from agents.trainer.checkpoint import disk_watch
from agents.trainer.checkpoint.disk_watch import DiskWatch
from agents.trainer.checkpoint.folder import CannotWrite, NoRoom
from tests.agents.small_disk import fill, small_disk
from tests.agents.trainer.ranks import (
    Run,
    finish,
    make_spec,
    read_journal,
    start_rank,
    terminate,
    wait_until,
)

NUM_STEPS = 30
KEEP = 2
STEP_S = 0.05


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        yield disk


def train_slowly(environ: dict[str, str]) -> None:
    """Be a rank with steps of a twentieth of a second and little patience."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.checkpoint import disk_watch, saver
    from agents.trainer.loop import Loop

    do_step = Loop._do_step

    def slow(self, step):
        time.sleep(STEP_S)
        return do_step(self, step)

    Loop._do_step = slow  # type: ignore[method-assign]
    saver.PAUSE_S = disk_watch.LOOK_S = 0.2
    saver.STOP_PATIENCE_S = 1.0
    os._exit(main())


class TwoNodes:
    """A run of two nodes that both keep copies; the second one has the small disk."""

    def __init__(self, tmp_path: Path, disk: Path, model: Path) -> None:
        saves = CheckpointSpec(every_minutes=None, every_steps=1, keep=KEEP, copies=2)
        self.run = Run(tmp_path / "run", model, make_spec(max_steps=NUM_STEPS, checkpoint=saves))
        self.run.num_ranks = 2
        intent = self.run.intend(checkpoint_ranks=(0, 1))
        ranks = (intent.ranks[0], replace(intent.ranks[1], node="there", local_rank=0))
        there = disk / "runs" / "r1" / "attempts" / "1"
        self.folders = (self.run.attempt_folder, there)
        there.mkdir(parents=True)
        self.ranks = []
        for rank, folder in enumerate(self.folders):
            mine = replace(intent, ranks=ranks, node=ranks[rank].node)
            (folder / "intent.json").write_text(json.dumps(to_wire(mine)))
            self.ranks.append(start_rank(mine, rank, folder, {}, train_slowly))

    def saved(self, rank: int) -> list[int]:
        folder = self.folders[rank].parents[1] / "checkpoints"
        return sorted(int(path.name[5:]) for path in folder.glob("step-*"))

    def lines(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_journal(self.folders[rank], rank) if line["kind"] == kind]

    def told(self) -> list[dict[str, Any]]:
        """Return what people are told of failed saves on the full disk."""
        failed = [line for line in self.lines(1, "checkpoint_failed") if not line["repeated"]]
        return [*self.lines(1, "warning"), *failed]

    def is_paused(self) -> bool:
        beats = [json.loads((f / f"rank-{r}.heartbeat").read_text()) for r, f in
                 enumerate(self.folders)]  # fmt: skip
        return all(beat["phase"] == "paused" for beat in beats)


def test_full_disk_is_one_warning_and_the_end_waits_for_room(tmp_path, disk, tiny_model):
    nodes = TwoNodes(tmp_path, disk, tiny_model)
    try:
        wait_until(lambda: len(nodes.saved(1)) > 0)
        filler = fill(disk)
        filled_s = time.time()
        common = nodes.saved(1)
        wait_until(lambda: len(nodes.told()) > 0, 20)
        assert nodes.told()[0]["time_s"] - filled_s < 5
        wait_until(nodes.is_paused, 60)
        assert len(nodes.told()) == 1, "one warning, not one a checkpoint"
        assert "of node there" in nodes.told()[0]["message"]
        assert "Free at least" in nodes.told()[0]["hint"]
        assert len(nodes.lines(1, "checkpoint_failed")) > 3
        kept = nodes.saved(0)
        assert len(kept) <= KEEP + 1, "the other node does not fill up as well"
        assert kept[-1] == NUM_STEPS
        assert kept[0] in common, "the newest that both have stays"
        assert len(nodes.lines(1, "paused")) == 1
        assert all(rank.is_alive() for rank in nodes.ranks)
        filler.unlink()
        assert finish(nodes.ranks, 30) == [0, 0]
    finally:
        finish(nodes.ranks, 0)
    assert nodes.saved(0) == [NUM_STEPS - 1, NUM_STEPS]
    assert nodes.saved(1)[-1] == NUM_STEPS
    assert len(nodes.lines(1, "disk_room")) == 1


def test_stop_with_a_full_disk_ends_with_the_reason(tmp_path, disk, tiny_model):
    nodes = TwoNodes(tmp_path, disk, tiny_model)
    try:
        wait_until(lambda: len(nodes.saved(1)) > 0)
        fill(disk)
        terminate(nodes.ranks)
        assert finish(nodes.ranks, 30) == [0, 3]
    finally:
        finish(nodes.ranks, 0)
    assert "The disk of node there is full" in nodes.lines(1, "failed")[0]["message"]


class Told:
    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append((kind, bool(fields.get("repeated"))))


def test_room_that_returns_asks_for_a_save(disk, monkeypatch):
    monkeypatch.setattr(disk_watch, "LOOK_S", 0.0)
    journal = Told()
    watch = DiskWatch(disk / "checkpoints", disk, "alpha", journal, lambda: 100_000)  # type: ignore[arg-type]
    assert not watch.look()
    assert journal.lines == []
    filler = fill(disk)
    assert not watch.look()
    assert not watch.look()
    error = watch.note_failed(NoRoom("full"), 5)
    assert "a checkpoint needs 167 kB, and 0 kB are free" in error.message
    assert journal.lines == [("warning", False), ("checkpoint_failed", True)]
    filler.unlink()
    assert watch.look(), "the failed save is made up for"
    watch.note_saved()
    assert journal.lines[2:] == [("disk_room", False)]
    assert not watch.look()
    # A disk that refuses although it has room is not tried at every step.
    assert watch.note_failed(CannotWrite("input/output error"), 6).message == "input/output error"
    assert journal.lines[3:] == [("checkpoint_failed", False)]


def test_a_disk_that_is_read_only_is_named_before_a_save_fails(disk, monkeypatch):
    monkeypatch.setattr(disk_watch, "LOOK_S", 0.0)
    journal = Told()
    watch = DiskWatch(disk / "checkpoints", disk, "alpha", journal, lambda: 100_000)  # type: ignore[arg-type]
    assert not watch.look()
    remount(disk, "ro")
    assert not watch.look()
    assert journal.lines == [("warning", False)]
    error = watch.note_failed(CannotWrite("[Errno 30] Read-only file system"), 5)
    assert "disk of node alpha is read-only" in error.message
    assert not watch.look(), "no save is tried"
    remount(disk, "rw")
    assert watch.look(), "the failed save is made up for"
    watch.note_saved()
    assert journal.lines == [("warning", False), ("checkpoint_failed", True), ("disk_room", False)]


def test_disk_that_takes_no_more_files_is_named_before_a_save_fails(disk, monkeypatch):
    monkeypatch.setattr(disk_watch, "LOOK_S", 0.0)
    journal = Told()
    watch = DiskWatch(disk / "checkpoints", disk, "alpha", journal, lambda: 100_000)  # type: ignore[arg-type]
    used = os.statvfs(disk)
    remount(disk, f"nr_inodes={used.f_files - used.f_ffree + 3}")
    assert not watch.look()
    assert journal.lines == [("warning", False)]
    error = watch.note_failed(NoRoom("full"), 5)
    assert "takes no more files" in error.message
    assert "Delete at least 13 files" in error.hint
    remount(disk, f"nr_inodes={used.f_files}")
    assert watch.look(), "the failed save is made up for"


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)

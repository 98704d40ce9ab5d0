"""The journal never blocks and loses nothing but steps; the heartbeat never hides a hang."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from agents.trainer.rank import journal as journal_module
from agents.trainer.rank.journal import Heartbeat, RankJournal
from tests.agents.small_disk import fill, small_disk


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_come_in_order_with_a_time(tmp_path):
    journal = RankJournal(tmp_path / "j")
    for step in range(500):
        journal.write("step", step=step, loss=float("nan"))
    journal.close()
    lines = read(tmp_path / "j")
    assert [line["step"] for line in lines] == list(range(500))
    assert all(line["loss"] is None for line in lines)
    assert lines[0]["time_s"] == pytest.approx(time.time(), abs=60)


class StuckDisk:
    """A write that fails until it is released, and then writes three bytes at a time."""

    def __init__(self, write):
        self.released = threading.Event()
        self._write = write

    def __call__(self, file, data):
        if not self.released.is_set():
            raise OSError(28, "No space left on device")
        return self._write(file, data[:3])


@pytest.fixture
def stuck_disk(monkeypatch):
    disk = StuckDisk(os.write)
    monkeypatch.setattr(journal_module.os, "write", disk)
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    return disk


def test_a_full_disk_neither_blocks_nor_tears_a_record(tmp_path, stuck_disk):
    journal = RankJournal(tmp_path / "j", capacity=10)
    started = time.monotonic()
    journal.write("checkpoint", step=0)
    for step in range(100):
        journal.write("step", step=step)
    journal.write("finished", step=100)
    assert time.monotonic() - started < 0.5
    stuck_disk.released.set()
    journal.close()
    lines = read(tmp_path / "j")
    assert [line["kind"] for line in lines if line["kind"] != "step"] == [
        "checkpoint",
        "finished",
        "warning",
    ]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == sorted(steps)
    assert steps[-1] == 99
    assert lines[-1]["message"] == f"{100 - len(steps)} step records were lost."


def test_a_disk_that_fills_up_is_reported_while_it_is_full(tmp_path):
    """Twenty failed saves once gave no warning, since the journal could not be written either."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "j"
        journal = RankJournal(path)
        journal.write("started")
        filler = fill(disk)
        for step in range(1, 301):
            journal.write("step", step=step, text="x" * 500)
        for step in range(20):
            journal.write("checkpoint_failed", step=step, message="The disk is full. " * 10)
        wait_for(lambda: sum(line["kind"] == "checkpoint_failed" for line in read(path)) == 20)
        steps = [line for line in read(path) if line["kind"] == "step"]
        assert 0 < len(steps) < 300
        filler.unlink()
        journal.close()
        steps = [line["step"] for line in read(path) if line["kind"] == "step"]
        assert steps == list(range(1, 301))
        assert path.stat().st_blocks * 512 < path.stat().st_size + 8192, "the rest was given back"


def wait_for(is_true, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_closing_gives_up_on_a_disk_that_stays_full(tmp_path, stuck_disk):
    journal = RankJournal(tmp_path / "j")
    journal.write("finished")
    started = time.monotonic()
    journal.close(timeout_s=0.2)
    assert 0.1 < time.monotonic() - started < 2
    stuck_disk.released.set()


def test_the_heartbeat_goes_on_alone_except_in_the_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(Heartbeat, "PERIOD_S", 0.02)
    path = tmp_path / "h"
    heartbeat = Heartbeat(path)

    def beats():
        before = json.loads(path.read_text())
        time.sleep(0.2)
        return json.loads(path.read_text())["monotonic_s"] > before["monotonic_s"]

    assert beats()
    heartbeat.beat(12, "training")
    assert not beats()
    assert json.loads(path.read_text())["step"] == 12
    heartbeat.beat(12, "saving")
    assert beats()
    heartbeat.beat(12, "evaluating")
    assert not beats()
    heartbeat.close()


def test_the_heartbeat_reports_the_forecast_time_of_a_step(tmp_path):
    heartbeat = Heartbeat(tmp_path / "h")
    heartbeat.forecast_step(12.3456)
    heartbeat.beat(0, "training")
    assert json.loads((tmp_path / "h").read_text())["foreseen_step_s"] == 12.346
    heartbeat.close()


def test_a_shorter_record_leaves_nothing_of_a_longer_one(tmp_path):
    heartbeat = Heartbeat(tmp_path / "h")
    heartbeat.beat(10**9, "warmup")
    heartbeat.beat(1, "done")
    assert json.loads((tmp_path / "h").read_text())["step"] == 1
    assert (tmp_path / "h").stat().st_size == 200
    heartbeat.close()

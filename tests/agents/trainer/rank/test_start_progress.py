"""A rank says how long a part of its start will take, from its speed or that of earlier starts."""

import json
from types import SimpleNamespace

import pytest

from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.start_progress import StartProgress
from agents.trainer.rank.start_times import StartTimes


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that begins a start, its clock, and one that reads its journal."""
    clock = [100.0]
    monkeypatch.setattr("agents.trainer.rank.start_progress.time.monotonic", lambda: clock[0])
    heartbeat = Heartbeat(tmp_path / "beat")
    group = SimpleNamespace(signal_alive=lambda: None)
    journals = []

    def begin():
        journals.append(RankJournal(tmp_path / f"journal-{len(journals)}"))
        return StartProgress(journals[-1], heartbeat, group, StartTimes(tmp_path / "compiled"))

    def read():
        journals[-1].close()
        lines = (tmp_path / f"journal-{len(journals) - 1}").read_text().splitlines()
        names = ("phase", "done", "total", "expected_s")
        return [tuple(json.loads(line).get(name) for name in names) for line in lines]

    yield begin, clock, read
    heartbeat.close()


def test_the_second_start_knows_the_speed_of_the_first(start):
    begin, clock, read = start
    progress = begin()
    for gib in range(11):  # one each second
        progress.report("weights", gib, 10)
        clock[0] += 1
    progress.end()
    assert read() == [
        ("weights", 0, 10, None),
        *(("weights", gib, 10, 10 - gib) for gib in range(2, 11, 2)),
        ("preparing", None, None, None),
    ]
    progress = begin()
    progress.report("weights", 0, 30)
    assert read() == [("weights", 0, 30, pytest.approx(33, rel=0.01))]


def test_what_is_over_in_a_moment_is_not_written(start):
    begin, _, read = start
    StartTimes(begin().times._path.parent).remember(10.0, "weights per second")
    begin().report("weights", 0, 10)
    assert read() == []


def test_what_the_caller_expects_counts(start):
    begin, clock, read = start
    progress = begin()
    progress.report("tuning", 0, 6, expected_s=25.0)
    clock[0] += 5
    progress.report("tuning", 1, 6, expected_s=21.5)
    clock[0] += 1
    progress.report("tuning", 2, 6, expected_s=20.0)  # too soon after the last one
    assert read() == [("tuning", 0, 6, 25.0), ("tuning", 1, 6, 21.5)]


def test_times_are_kept_by_name_and_a_damaged_file_is_an_empty_one(tmp_path):
    times = StartTimes(tmp_path / "new")
    assert times.recall("imports") is None
    times.remember(12.5, "tuning a", "tuning")
    times.remember(3.0, "tuning b", "tuning")
    assert times.recall("tuning a", "tuning") == 12.5
    assert StartTimes(tmp_path / "new").recall("tuning c", "tuning") == 3.0
    for number in range(300):
        times.remember(1.0, f"tuning {number}")
    assert times.recall("tuning a") is None
    (tmp_path / "new" / "start_times.json").write_text("{")
    assert times.recall("tuning") is None
    (tmp_path / "file").write_text("")
    StartTimes(tmp_path / "file").remember(1.0, "imports")  # no folder can be made: no error

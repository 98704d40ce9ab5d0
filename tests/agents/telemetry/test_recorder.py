"""One recorder per home, found by every server, replaced by a newer one, gone when not wanted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agents.node.facts import find_recorder as find_any_recorder
from agents.node.facts import read_gpus
from agents.state import (
    Home,
    Identity,
    archive_path,
    identity_from,
    open_home,
    read_json,
    take_lock,
    write_json,
)
from agents.telemetry import lease
from agents.telemetry import recorder as module
from agents.telemetry.gpu import GpuReader
from agents.telemetry.lease import keep_recorder, read_renewal, renew
from agents.telemetry.ring import RingReader, RingWriter

REPOSITORY = str(Path(__file__).parents[3])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    made = open_home()
    yield made
    recorder = find_recorder(made)
    if recorder is not None and recorder.is_alive():
        os.kill(recorder.pid, signal.SIGKILL)


def find_recorder(home: Home) -> Identity | None:
    return identity_from(read_json(home.telemetry / "recorder.json"))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_samples(home: Home) -> int:
    return RingReader(home.telemetry / "samples").read_newest_seq()


def test_recorder_starts_once_and_samples_each_second(home: Home) -> None:
    keep_recorder(home, REPOSITORY, replace=True)
    wait_for(lambda: find_recorder(home))
    first = find_recorder(home)
    assert first is not None
    keep_recorder(home, REPOSITORY, replace=True)
    subprocess.run([sys.executable, "-m", "agents", "record"], check=True, timeout=20)
    assert find_recorder(home) == first
    assert os.getsid(first.pid) == first.pid
    wait_for(lambda: num_samples(home) >= 3)
    times = [s["time_s"] for s in RingReader(home.telemetry / "samples").read_since(0.0)]
    assert times[2] - times[1] == pytest.approx(1.0, abs=0.3)


def test_recorder_of_another_version_makes_room(home: Home) -> None:
    keep_recorder(home, REPOSITORY, replace=True)
    wait_for(lambda: find_recorder(home) and num_samples(home))
    first = find_recorder(home)
    assert first is not None
    keep_recorder(home, "/elsewhere/newer.zip", replace=False)
    time.sleep(0.1)
    assert first.is_alive()
    keep_recorder(home, "/elsewhere/newer.zip", replace=True)
    wait_for(lambda: find_recorder(home) not in (None, first))
    assert not first.is_alive()


def test_recorder_with_other_limits_makes_room(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_recorder(home, REPOSITORY, replace=True)
    wait_for(lambda: find_recorder(home) and num_samples(home))
    first = find_recorder(home)
    assert first is not None
    keep_recorder(home, archive_path(), replace=True)
    assert find_recorder(home) == first
    # This server is in a container of 2 GiB, and the recorder is not.
    limits = {None: (2 << 30, None), first.pid: (None, None)}
    monkeypatch.setattr(lease, "read_group_limits", lambda process=None: limits[process])
    keep_recorder(home, archive_path(), replace=True)
    wait_for(lambda: find_recorder(home) not in (None, first))
    assert not first.is_alive()


def test_killed_recorder_is_replaced_and_the_history_stays(home: Home) -> None:
    keep_recorder(home, REPOSITORY, replace=True)
    wait_for(lambda: num_samples(home) >= 2)
    first = find_recorder(home)
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not first.is_alive())
    before = num_samples(home)
    keep_recorder(home, REPOSITORY, replace=True)
    wait_for(lambda: num_samples(home) > before)
    seqs = [s["seq"] for s in RingReader(home.telemetry / "samples").read_since(0.0)]
    assert seqs == list(range(1, len(seqs) + 1))


def test_recorder_of_a_deleted_home_ends(home: Home) -> None:
    keep_recorder(home, REPOSITORY, replace=True)
    wait_for(lambda: num_samples(home))
    recorder = find_recorder(home)
    assert recorder is not None
    shutil.rmtree(home.path)
    wait_for(lambda: not recorder.is_alive())


def test_facts_come_from_the_recorder(home: Home) -> None:
    keep_recorder(home, REPOSITORY, replace=True)
    cards, problem = read_gpus(home)
    assert isinstance(cards, tuple)
    assert problem is None or "NVIDIA" in problem


def test_missing_recorder_is_said(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.node.facts.RECORDER_TIMEOUT_S", 0.1)
    cards, problem = read_gpus(home)
    assert cards == ()
    assert problem is not None
    assert "recorder did not start" in problem


def test_recorder_of_another_pc_is_told_at_once(home: Home) -> None:
    """With one folder on two PCs, the lock is held, and no process here has that identity."""
    lock = os.open(home.telemetry / "recorder.lock", os.O_RDWR | os.O_CREAT)
    assert take_lock(lock, 0.0)
    identity = {"pid": os.getpid(), "start_ticks": 1, "boot_id": "of another PC"}
    write_json(home.telemetry / "recorder.json", {**identity, "gpus": []})
    assert find_any_recorder(home) == ({}, "elsewhere")
    cards, problem = read_gpus(home)
    assert (cards, problem and problem.partition(",")[0]) == (
        (),
        "the telemetry recorder of another PC uses this node's folder",
    )
    os.close(lock)


def test_recorder_of_an_earlier_boot_is_not_that_of_another_pc(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = {"pid": os.getpid(), "start_ticks": 1, "boot_id": "before the restart"}
    write_json(home.telemetry / "recorder.json", {**identity, "gpus": []})
    with monkeypatch.context() as short:
        short.setattr("agents.node.facts.RECORDER_TIMEOUT_S", 0.2)
        assert find_any_recorder(home) == ({}, "missing")
    keep_recorder(home, REPOSITORY, replace=True)
    assert find_any_recorder(home)[1] == "here"


def sample_until_end(home: Home, monkeypatch: pytest.MonkeyPatch, held: Callable[[], bool]) -> int:
    """Run the recorder's loop with seconds that pass at once; return how many samples it took."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 5000:
            raise TimeoutError

    # Of this module alone: threads of other tests may still sleep.
    played = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(module, "time", played)
    monkeypatch.setattr(module, "is_any_held", lambda home: held())
    ring = RingWriter(home.telemetry / "samples", 0)
    module._sample_on(home, GpuReader(None), ring)
    return ring.next_seq - 1


def test_recorder_ends_when_nobody_renews(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_until_end(home, monkeypatch, lambda: False) == pytest.approx(902, abs=2)


def test_recorder_stays_as_long_as_an_attempt_lives(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True, True, False])
    taken = sample_until_end(home, monkeypatch, lambda: next(answers))
    assert taken == pytest.approx(3 * 901, abs=5)


def test_renewal_is_seen(home: Home) -> None:
    assert read_renewal(home) == 0.0
    renew(home)
    first = read_renewal(home)
    time.sleep(0.05)
    renew(home)
    assert read_renewal(home) > first > 0

"""Whose process is ours, and what happens when one cannot be ended."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.supervisor import sweep
from agents.supervisor.sweep import Tag, describe_unkillable, find_processes
from agents.supervisor.verdict import AttemptOutcome, name_stuck

TAG = Tag("run-1", 2, Path("/home/a/runs/run-1/attempts/2"))


@pytest.mark.parametrize(
    ("environ", "ours"),
    [
        ({b"RACKLESS_TAG": b"run-1.2"}, True),
        ({b"RACKLESS_TAG": b"run-1.2", b"RACKLESS_ATTEMPT_DIR": os.fsencode(TAG.folder)}, True),
        ({b"RACKLESS_TAG": b"run-1.2", b"RACKLESS_ATTEMPT_DIR": b"/home/b"}, False),
        ({b"RACKLESS_TAG": b"run-1.20"}, False),
        ({b"RACKLESS_TAG": b"run-1"}, False),
        ({b"X_RACKLESS_TAG": b"run-1.2"}, False),
        ({}, False),
    ],
)
def test_whose_process_it_is(environ: dict[bytes, bytes], ours: bool) -> None:
    assert TAG.fits(environ) is ours


def test_this_process_is_nobodys() -> None:
    assert os.getpid() not in find_processes(TAG)


def test_unkillable_process_is_reported_and_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(sweep, "SETTLE_S", 0.3)
    monkeypatch.setattr(sweep, "find_processes", lambda *_: [os.getpid()])
    monkeypatch.setattr(sweep, "send_signal", lambda tag, pid, number: signals.append(number))
    began_s = time.monotonic()
    left = sweep.sweep(TAG, grace_s=0.2)
    assert time.monotonic() - began_s < 2.0
    assert left == [os.getpid()]
    assert signals[0] == 15
    assert set(signals[1:]) == {9}
    text = describe_unkillable(left, "a")
    assert f"Process {os.getpid()} (" in text
    assert "on node a cannot be killed" in text
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "is_frozen", lambda pid: True)
        assert describe_unkillable(left, "a").endswith("ends only once that group is thawed.")
    hangs = AttemptOutcome(state="failed", message="It hangs.", cause="stalled", lost_nodes=("b",))
    named = name_stuck(hangs, left, "a")
    assert named == replace(hangs, message=f"It hangs. {text}", hint="Restart that PC")
    assert name_stuck(AttemptOutcome(state="done"), left, "a").state == "failed"

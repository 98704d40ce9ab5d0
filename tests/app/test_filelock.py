"""A lock says who holds it, and nothing waits for it silently or for good."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import filelock
from app.errors import LockHeld, UserError
from app.filelock import is_held, locked, read_holder, try_held, try_locked

HOLD = """
import sys
from pathlib import Path
from app.filelock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "x.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.kill()


def test_a_waiter_names_the_holder_and_gives_up_with_what_to_do(
    tmp_path: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(filelock, "NOTICE_S", 0.0)
    path = tmp_path / "x.lock"
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(LockHeld, match=f"is in use by process {holder.pid} ") as error,
        locked(path, limit_s=0.2),
    ):
        pass
    assert error.value.hint == f"Wait until it ends, or end it: kill {holder.pid}."
    (said,) = caplog.messages
    assert said.startswith(f"waiting: {path} is in use by process {holder.pid}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is suspended")
def test_a_suspended_holder_is_called_that(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    with (
        pytest.raises(LockHeld, match="which is suspended") as error,
        locked(tmp_path / "x.lock", limit_s=0.0),
    ):
        pass
    assert f"kill -CONT {holder.pid}" in error.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is suspended")
def test_a_wait_without_limit_ends_for_a_suspended_holder_alone(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set-up waited without end for another one that had been suspended while it loaded."""
    monkeypatch.setattr(filelock, "LIMIT_S", 0.0)
    asked: list[bool] = []

    def look(path: Path) -> bool:
        asked.append(is_suspended := found(path))
        if len(asked) == 3:  # it has gone on working until now
            holder.send_signal(signal.SIGSTOP)
            os.waitpid(holder.pid, os.WUNTRACED)
        return is_suspended

    found = filelock._is_holder_suspended
    monkeypatch.setattr(filelock, "_is_holder_suspended", look)
    with (
        pytest.raises(LockHeld, match="which is suspended"),
        locked(tmp_path / "x.lock", limit_s=None),
    ):
        pass
    assert asked == [False, False, False, True]


def test_a_killed_holder_leaves_no_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / "x.lock"
    assert try_locked(path) is None
    holder.kill()
    holder.wait()
    with locked(path):
        found = read_holder(path)
        assert found is not None
        assert found.pid == os.getpid()


def test_a_lock_of_an_earlier_version_has_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch()
    handle = try_locked(path)
    assert handle is not None
    assert read_holder(path) is None
    with pytest.raises(LockHeld, match="which left no record"), locked(path, limit_s=0.0):
        pass
    assert try_held(path) is None
    os.close(handle)
    handle = try_held(path)
    assert handle is not None
    os.close(handle)


def test_a_lock_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.mkdir()
    for use in (is_held, try_held, try_locked):
        with pytest.raises(UserError, match=r"lock file .*x\.lock cannot be opened") as error:
            use(path)
        assert "delete it" in error.value.hint

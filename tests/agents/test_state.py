"""Durable files and the identity of processes."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agents.errors import ExpectedError
from agents.state import (
    Home,
    Identity,
    boot_id,
    identify,
    identity_from,
    locked,
    open_home,
    read_json,
    require_name,
    write_json,
)
from tests.agents.small_disk import fill, small_disk


def test_json_file_is_private_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    write_json(path, {"x": [2, "\u00e4"]})
    assert read_json(path) == {"x": [2, "\u00e4"]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_disk_full_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        path = disk / "a.json"
        write_json(path, {"x": 1})
        filler = fill(disk)
        with pytest.raises(ExpectedError) as caught:
            write_json(path, {"x": "y" * 50_000})
        assert caught.value.message == f"The disk is full: writing {path}."
        assert read_json(path) == {"x": 1}
        assert sorted(disk.iterdir()) == [path, filler]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00"])
def test_broken_file_reads_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    assert read_json(path) is None
    path.write_text(text)
    assert read_json(path) is None


@pytest.mark.parametrize("name", ["a", "Run-1.2_x", "9" * 128])
def test_plain_names_are_allowed(name: str) -> None:
    assert require_name(name, "The run id") == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "a/b", "a b", "a\n", "\u00e4", "a" * 129]
)
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(ExpectedError, match="The run id"):
        require_name(name, "The run id")


def test_home_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "deep" / "home"))
    home = open_home()
    assert home == Home(tmp_path / "deep" / "home")
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert sorted(path.name for path in home.path.iterdir()) == ["leases", "runs", "telemetry"]


def test_home_is_in_the_users_data_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RACKLESS_AGENT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_home().path == tmp_path / ".local" / "share" / "rackless-agent"


@pytest.mark.parametrize(("number", "speaks"), [(errno.ENOSPC, True), (errno.EACCES, False)])
def test_full_disk_does_not_keep_the_agent_from_speaking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, speaks: bool
) -> None:
    def touch(path: Path, **_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Path, "touch", touch)
    if speaks:
        assert open_home() == Home(tmp_path / "home")
    else:
        with pytest.raises(ExpectedError, match="no permission to write"):
            open_home()


def test_home_that_is_read_only_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        monkeypatch.setenv("RACKLESS_AGENT_HOME", str(disk / "home"))
        with pytest.raises(ExpectedError) as caught:
            open_home()
        assert f"preparing the agent's home folder {disk}/home" in caught.value.message
        assert "Read-only file system" in caught.value.message
        assert caught.value.hint


def test_process_is_known_by_more_than_its_pid() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    assert identity is not None
    assert identity.is_alive()
    assert identity_from(identity.to_json()) == identity
    assert not Identity(identity.pid, identity.start_ticks + 1, identity.boot_id).is_alive()
    assert not Identity(identity.pid, identity.start_ticks, "another boot").is_alive()
    process.communicate(b"\n")
    assert not identity.is_alive()
    assert identify(process.pid) is None


def test_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    process.wait()


@pytest.mark.parametrize("value", [None, {}, {"pid": "x"}, {"pid": 1, "start_ticks": None}])
def test_no_identity_in_other_values(value: dict[str, object] | None) -> None:
    assert identity_from(value) is None


def test_boot_id_is_there() -> None:
    assert len(boot_id()) == 36


def test_lock_makes_others_wait_then_gives_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, 0.0, "busy"):
        began_s = time.monotonic()
        with pytest.raises(ExpectedError, match="busy"), locked(path, 0.2, "busy"):
            pass
        assert time.monotonic() - began_s >= 0.2
    release = threading.Event()

    def hold() -> None:
        with locked(path, 0.0, "busy"):
            release.wait(5)

    holder = threading.Thread(target=hold)
    holder.start()
    threading.Timer(0.2, release.set).start()
    with locked(path, 5.0, "busy"):
        pass
    holder.join()

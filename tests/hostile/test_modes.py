"""Other users of the same PC: they can read nothing that Rackless keeps, on master and nodes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.paths import private_folder
from app.runs.journals.mirror import Mirror

Attack = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
OTHERS = stat.S_IRWXG | stat.S_IRWXO

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no modes")


def rackless(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell with the usual umask does."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "RACKLESS_HOME": str(home),
        "RACKLESS_AGENT_HOME": str(home.parent / "agent"),
    }
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        umask=0o022,
    )


def find_open(folder: Path) -> list[str]:
    """Return everything in and below a folder that others may use, with its mode."""
    found = [folder, *folder.rglob("*")]
    modes = {path: path.lstat().st_mode for path in found if not path.is_symlink()}
    return [f"{path} {mode & 0o777:o}" for path, mode in modes.items() if mode & OTHERS]


def test_nobody_else_can_read_what_master_and_agent_keep(tmp_path: Path, attack: Attack) -> None:
    home = tmp_path / "deep" / "master"
    added = rackless(home, "nodes", "add", "here", "--local")
    assert added.returncode == 0, added.stderr
    assert rackless(home, "settings", "set", "node_timeout_s", "60").returncode in (0, 2)
    assert rackless(home, "nodes", "list", "--json").returncode == 0
    found = find_open(tmp_path / "deep")
    attack(given="a shell with umask 022", tried="read the master's files", happened=str(found))
    assert (home / "nodes.json").exists()
    assert found == []
    assert find_open(home.parent / "agent") == []


def test_a_mirror_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Mirror(tmp_path / "runs" / "r-1" / "alpha").append("rank-0.log", 0, b"a private text")
    finally:
        os.umask(before)
    assert find_open(tmp_path / "runs") == []


def test_a_private_folder_has_private_parents(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert find_open(tmp_path / "a") == []


def test_an_open_home_is_closed_with_one_notice(tmp_path: Path, attack: Attack) -> None:
    home = tmp_path / "master"
    assert rackless(home, "nodes", "list").returncode == 0
    log = home / "runs" / "r-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("a private text")
    for path in (home, *home.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    first, second = rackless(home, "nodes", "list"), rackless(home, "nodes", "list")
    attack(given="a home that all may read", tried="nodes list", happened=first.stderr)
    assert find_open(home) == []
    assert "Other users of this PC could read" in first.stderr
    assert second.stderr == ""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_a_home_of_another_user_is_refused(tmp_path: Path, attack: Attack) -> None:
    home = tmp_path / "master"
    home.mkdir(mode=0o777)
    os.chown(home, 12345, 12345)
    refused = rackless(home, "nodes", "list")
    attack(given="a home of another user", tried="nodes list", happened=refused.stderr)
    assert refused.returncode == 1
    assert "belongs to another user" in refused.stderr
    assert "RACKLESS_HOME" in refused.stderr
    assert list(home.iterdir()) == []


OPEN_HOME = """
from agents.errors import ExpectedError
from agents.state import open_home
try:
    print(oct(open_home().path.stat().st_mode & 0o777))
except ExpectedError as error:
    print(error, error.hint)
"""


def open_agent_home(home: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RACKLESS_AGENT_HOME": str(home)}
    command = [sys.executable, "-c", OPEN_HOME]
    return subprocess.check_output(command, env=environ, text=True, timeout=30)


def test_an_open_home_of_an_agent_is_closed(tmp_path: Path) -> None:
    home = tmp_path / "agent"
    home.mkdir()
    home.chmod(0o777)
    assert open_agent_home(home) == "0o700\n"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_a_home_of_an_agent_that_is_another_users_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "agent"
    home.mkdir(mode=0o777)
    os.chown(home, 12345, 12345)
    assert "belongs to another user of this node" in open_agent_home(home)


def make_shared(folder: Path) -> Path:
    """Return a folder such as /srv, with a file that all users of the PC read."""
    (folder / "shared").mkdir(parents=True)
    (folder / "shared" / "hosts").write_text("for all")
    for path in (folder, folder / "shared"):
        path.chmod(0o755)
    (folder / "shared" / "hosts").chmod(0o644)
    return folder


def test_a_folder_of_other_things_is_never_closed_to_its_users(
    tmp_path: Path, attack: Attack
) -> None:
    shared = make_shared(tmp_path / "srv")
    before = find_open(shared)
    refused = rackless(shared, "nodes", "list")
    attack(given="RACKLESS_HOME=/srv", tried="nodes list", happened=refused.stderr)
    assert refused.returncode == 1
    assert "other files, such as shared" in refused.stderr
    assert find_open(shared) == before
    said = open_agent_home(shared)
    attack(given="RACKLESS_AGENT_HOME=/srv", tried="open it", happened=said)
    assert "other files, such as shared" in said
    assert find_open(shared) == before
    assert [path.name for path in shared.iterdir()] == ["shared"]


def test_a_new_disk_is_closed_and_used(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "lost+found").mkdir(parents=True)
    disk.chmod(0o755)
    assert open_agent_home(disk).strip() == "0o700"
    disk = tmp_path / "other"
    (disk / "lost+found").mkdir(parents=True)
    disk.chmod(0o755)
    assert rackless(disk, "nodes", "list").returncode == 0
    assert find_open(disk) == []

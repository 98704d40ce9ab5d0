"""A fault of a node behind a real sshd is found, repaired through sudo, tested again and undone.

The user of the node is none with rights: only a sudo that demands a password changes anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import SYSTEM_PATH, Cluster, Node
from tests.cluster.terminal import type_at_terminal
from tests.fakes.sudo import write_sudo

pytestmark = [pytest.mark.netns, pytest.mark.campaign]
ROOT = Path(__file__).resolve().parents[2]
USER, USER_ID = "trainer", 4711
PASSWORD = "correct-horse-battery-61"
PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
PAUSE_S = 0.1
NARROW = "60000\t60099"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user of this PC can pass through."""
    folder = Path(tempfile.mkdtemp(prefix="rackless-repairs-"))
    if os.statvfs(folder).f_flag & os.ST_NOSUID:
        pytest.skip("programs change no rights in the folder for temporary files")
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def give_user(cluster: Cluster, node: Node, place: Path) -> None:
    """Let the node's sshd take an ordinary user, who has our sudo and files of /etc of its own."""
    cluster.stop_sshd(node)
    names = place / "passwd"
    entry = f"{USER}:x:{USER_ID}:{USER_ID}::{node.home}:/bin/sh\n"
    names.write_text(Path("/etc/passwd").read_text() + entry)
    for folder in (node.home, node.home.parent):
        folder.chmod(0o755)
    os.chown(node.home, USER_ID, USER_ID)
    rights = place / "as-root"
    shutil.copy("/usr/bin/env", rights)
    rights.chmod(0o4755)
    programs = write_sudo(place / "bin", PASSWORD, become=str(rights), pause_s=PAUSE_S)
    settings = node.folder / "sshd_config"
    text = settings.read_text().replace("SetEnv ", f"SetEnv PATH={programs}:{SYSTEM_PATH} ")
    settings.write_text(text.replace("UsePAM yes", "UsePAM no"))
    cluster.start_sshd(
        node, {Path("/etc/passwd"): names, Path("/etc/sysctl.d"): made(place / "sysctl.d")}
    )


def made(folder: Path) -> Path:
    folder.mkdir()
    (folder / "10-other.conf").write_text("kernel.pid_max = 4194304\n")
    return folder


def ports_of(cluster: Cluster, node: Node) -> str:
    return cluster.run(node, "cat", PORTS).strip()


def content_of(folder: Path) -> str:
    """Return a hash over names, modes, owners and contents."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state = path.stat()
        found.update(f"{path} {state.st_mode} {state.st_uid} {state.st_gid}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


class Spy(threading.Thread):
    """Reads arguments and environments of all processes, over and over."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[str] = []
        self.num_sudos = 0
        self._ended = threading.Event()

    def run(self) -> None:
        # sudo has the password for PAUSE_S each time, so none is missed.
        while not self._ended.wait(PAUSE_S / 5):
            for entry in os.listdir("/proc"):
                if entry.isdigit():
                    self._look_at(entry)

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _look_at(self, pid: str) -> None:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            self.num_sudos += b"/bin/sudo\0-k\0-S" in words
            words += Path(f"/proc/{pid}/environ").read_bytes()
            if PASSWORD.encode() in words:
                self.seen.append(words.decode("utf-8", "replace"))


def run_probe(cluster: Cluster, node: Node, home: Path) -> list[dict[str, object]]:
    process = cluster.start(
        cluster.master,
        *(sys.executable, "-m", "tests.cluster.repair_probe", "--user", USER),
        *("--host", node.address, "--key", str(cluster.key), "--home", str(home)),
        *("--fingerprint", cluster.fingerprint(node)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    said, _ = process.communicate(f"{PASSWORD}\n", timeout=60)
    assert process.returncode == 0
    return [json.loads(line) for line in said.splitlines()]


def type_password(shown: str) -> str | None:
    return PASSWORD if shown.endswith("Password for sudo on pc: ") else None


def at_terminal(cluster: Cluster, home: Path, *words: str) -> str:
    """Run a command of ours at a terminal, type the password when asked; return what it shows."""
    code, shown = type_at_terminal(cluster, home, *words, typist=type_password)
    assert code == 0, shown
    return shown


def test_a_narrow_range_of_ports_is_repaired_and_undone_and_the_password_is_nowhere(
    place: Path,
) -> None:
    home = place / "master"
    spy = Spy()
    with Cluster(place / "cluster", num_nodes=1) as cluster:
        node = cluster.nodes[0]
        give_user(cluster, node, place)
        cluster.run(node, "sh", "-c", f"echo {NARROW} > {PORTS}")
        before = ports_of(cluster, node), content_of(place / "sysctl.d")
        spy.start()
        try:
            found, admin, refused, applied, after = run_probe(cluster, node, home)
            shown = at_terminal(cluster, home, "nodes", "changes", "pc")
            repaired = ports_of(cluster, node)
            undone = at_terminal(cluster, home, "nodes", "undo", "pc", "--all")
        finally:
            spy.end()
        assert found["row"] == "warn"
        assert admin["admin"] == "password"
        assert "did not take the password" in str(refused["refused"])
        change = applied["change"]
        assert isinstance(change, dict)
        assert [step["state"] for step in change["steps"]] == ["done", "done"], change
        assert change["problem"] == ""
        assert after["row"] == "pass"
        assert repaired == "32768\t60999"
        assert "in force" in shown
        assert "+net.ipv4.ip_local_port_range = 32768 60999" in shown
        assert "1 of 1 change undone" in undone
        assert (ports_of(cluster, node), content_of(place / "sysctl.d")) == before
        assert PASSWORD not in shown + undone
    assert spy.num_sudos > 3, "sudo was watched while it had the password"
    assert spy.seen == []
    files = [path for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "1.json" for path in files), "the log of changes is among them"
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []

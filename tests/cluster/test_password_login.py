"""A person at a terminal adds a PC that knows no key of theirs: sshd, a password, our key."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.master import ROOT
from tests.cluster.namespaces import SYSTEM_PATH, Cluster, Node

pytestmark = [pytest.mark.netns, pytest.mark.campaign]
PASSWORD = "correct horse battery"
DEADLINE_S = 60.0


def let_in_by_password(cluster: Cluster, node: Node, folder: Path) -> Path:
    """Restart a node's sshd with passwords, and keys of its own home; return that list of keys."""
    keys = node.home / ".ssh" / "authorized_keys"
    config = node.folder / "sshd_config"
    lines = [
        line
        for line in config.read_text().splitlines()
        if line.split()[0] not in ("AuthorizedKeysFile", "PermitRootLogin", "UsePAM")
        and not line.startswith("PasswordAuthentication")
    ]
    more = ("PermitRootLogin yes", "PasswordAuthentication yes", "UsePAM no")
    config.write_text("\n".join([*lines, *more, f"AuthorizedKeysFile {keys}"]) + "\n")
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", PASSWORD], capture_output=True, text=True, check=True
    ).stdout.strip()
    shadow = folder / "shadow"
    others = Path("/etc/shadow").read_text().splitlines()[1:]
    shadow.write_text("\n".join([f"root:{hashed}:19000:0:99999:7:::", *others]) + "\n")
    cluster.stop_sshd(node)
    cluster.start_sshd(node, {Path("/etc/shadow"): shadow})
    return keys


def at_a_terminal(
    argv: Sequence[str], environ: dict[str, str], answers: Sequence[tuple[str, str]]
) -> tuple[int, str]:
    """Run a command on a terminal and type each answer after its question; return all it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], list(argv), environ)
    shown, end_s = "", time.monotonic() + DEADLINE_S
    waiting = list(answers)
    try:
        while time.monotonic() < end_s:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    data = os.read(terminal, 4096)
                except OSError:  # the other end is closed
                    break
                shown += data.decode(errors="replace")
            if waiting and re.search(waiting[0][0], shown.rpartition("\x00")[2]):
                os.write(terminal, waiting.pop(0)[1].encode() + b"\n")
                shown += "\x00"
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, shown.replace("\x00", "")


def test_a_pc_is_added_by_its_password_and_reached_by_the_key(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", 1) as cluster:
        node = cluster.nodes[0]
        keys = let_in_by_password(cluster, node, tmp_path)
        (tmp_path / "me").mkdir()
        environ = {
            **os.environ,
            "HOME": str(tmp_path / "me"),
            "RACKLESS_HOME": str(tmp_path / "home"),
            "SSH_AUTH_SOCK": "",
            "PYTHONPATH": str(ROOT),
            "PATH": SYSTEM_PATH,
        }

        def rackless(*words: str, answers: Sequence[tuple[str, str]] = ()) -> tuple[int, str]:
            argv = cluster.command(cluster.master, sys.executable, "-P", "-m", "app", *words)
            return at_a_terminal(argv, environ, answers)

        add = ("nodes", "add", "big", "--ssh", f"root@{node.address}")
        question = (r"Do they match\? \[y/N\]", "y")
        code, shown = rackless(*add, answers=[question, (r"Password of root@", PASSWORD)])
        assert code == 0, shown
        assert "big (root@" in shown
        assert "id_ed25519, which was just made, is added" in shown
        assert PASSWORD not in shown
        public = (tmp_path / "me" / ".ssh" / "id_ed25519.pub").read_text().split()[1]
        assert [line.split()[1] for line in keys.read_text().splitlines()] == [public]
        # It logs in with the key alone.
        back, question = ("nodes", "key", "big", "--take-back"), r"Take it back\? \[y/N\]"
        code, shown = rackless(*back, answers=[(question, "n")])
        assert (code, public in keys.read_text()) == (1, True), shown
        assert "Without another key, big can no longer be reached." in shown
        code, shown = rackless(*back, answers=[(question, "y")])
        assert (code, keys.read_text()) == (0, ""), shown

"""A PC whose `python3` is a liar: it speaks the protocol and answers what its owner wants.

Behind Debian's own sshd, so that the master reaches it as it reaches every node. The liar reads
what to say from a file, which a test writes.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import SYSTEM_PATH, root_is_locked

# `answers`: result by kind of request; `lines`: what to print after the answer to a request;
# `silent`: kinds without an answer of their own; `send`: what the command `send` prints, and how
# much rubbish behind it.
PROGRAM = """
import base64, json, os, sys, time

def plan():
    with open(PLAN) as file:
        return json.load(file)

def put(text):
    sys.stdout.write(text)
    sys.stdout.flush()

def main():
    zip, command, nonce = sys.argv[-3:]
    if command == "send":
        said = plan()["send"]
        put(said["header"] + "\\n")
        for _ in range(said.get("flood_mib", 0)):
            put("x" * (1 << 20))
        time.sleep(said.get("pause_s", 0))
        return
    if command != "serve":
        return
    home = os.path.dirname(os.path.dirname(os.path.abspath(zip)))
    hello = {"version": VERSION, "archive_sha256": os.path.basename(zip)[:-4], "python": "3.12.0",
             "hostname": "liar", "pid": 1, "boot_id": "b", "agent_home": home}
    put("RACKLESS " + nonce + "\\n")
    put(json.dumps({"type": "event", "kind": "hello", "data": hello}) + "\\n")
    for line in sys.stdin:
        request = json.loads(line)
        kind, number = request["kind"], request["id"]
        answers = plan()["answers"]
        answer = {"type": "response", "id": number}
        if kind in answers:
            answer["result"] = answers[kind]
        elif kind == "ping":
            answer["result"] = {"wall_s": time.time(), "monotonic_s": 1.0}
        else:
            answer["error"] = {"kind": "user", "message": "I cannot " + kind}
        if kind not in plan().get("silent", ()):
            put(json.dumps(answer) + "\\n")
        for raw in plan().get("lines", {}).get(kind, ()):
            put(raw.replace("NUMBER", str(number)) + "\\n")

main()
"""
FACTS: dict[str, Any] = {
    "hostname": "liar",
    "os": "Debian",
    "kernel": "6.1",
    "python": "3.12.0",
    "architecture": "x86_64",
}


class Liar:
    """The PC; `answers`, `lines` and `send` are what it says from the next request on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.key = folder / "key"
        self._plan: dict[str, Any] = {}

    def says(self, answers: dict[str, Any], **more: Any) -> None:
        """Set what it answers, by kind of request."""
        plan = {"answers": {"facts": FACTS, "attempt.list": {"attempts": []}, **answers}, **more}
        new = self.folder / "plan.new"
        new.write_text(json.dumps(plan))
        new.replace(self.folder / "plan.json")

    @property
    def address(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def fingerprint(self) -> str:
        command = ["ssh-keygen", "-lf", str(self.folder / "host_key.pub")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]

    def arguments(self, name: str = "liar") -> tuple[str, ...]:
        """Return the command line that adds it."""
        trust = ("--accept-host-key", self.fingerprint)
        return ("nodes", "add", name, "--ssh", self.address, "--key", str(self.key), *trust)


@contextlib.contextmanager
def lying_pc(folder: Path) -> Iterator[Liar]:
    """A running sshd on this PC's loopback, ended after the block."""
    folder.mkdir()
    liar = Liar(folder)
    liar.says({})
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    _write_program(folder)
    (folder / "sshd_config").write_text(_settings(liar))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd refuses to start without it
    sshd = shutil.which("sshd", path=SYSTEM_PATH) or "sshd"
    with (folder / "sshd.log").open("ab") as log:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:
        _wait_for(liar.port, process)
        yield liar
    finally:
        process.terminate()
        process.wait(10)


def _write_program(folder: Path) -> None:
    from agents.contract.messages import PROTOCOL_VERSION

    told = f"PLAN, VERSION = {str(folder / 'plan.json')!r}, {PROTOCOL_VERSION}\n"
    (folder / "liar.py").write_text(told + PROGRAM)
    (folder / "bin").mkdir()
    python = folder / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I {folder}/liar.py "$@"\n')
    python.chmod(0o755)


def _settings(liar: Liar) -> str:
    folder = liar.folder
    path = f"{folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    lines = [
        f"Port {liar.port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder}/host_key",
        "PidFile none",
        f"AuthorizedKeysFile {folder}/key.pub",
        "StrictModes no",  # the key lies in a temporary folder
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        f"UsePAM {'yes' if root_is_locked() else 'no'}",
        "UseDNS no",
        f"SetEnv PATH={path} RACKLESS_AGENT_HOME={folder}/agent-home HOME={folder}",
    ]
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError("the sshd of the lying PC did not start")

"""The archive's entry, down to an old Python, and the real archive up to its first samples."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agents.__main__ as entry
from agents.contract.messages import Event, decode
from app.nodes.archive import build_archive
from tests.agents.serve.test_server import Agent

SOURCE = Path(entry.__file__)


@pytest.mark.parametrize("minor", [6, 7, 8, 9])
def test_entry_can_be_parsed_by_old_pythons(minor: int) -> None:
    for path in (SOURCE, SOURCE.with_name("__init__.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, minor))
        futures = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert minor >= 7 or all(
            node.module != "__future__" or node.names[0].name != "annotations"
            for node in futures
            if path == SOURCE
        )


def test_old_python_is_told_to_a_master(capfd: pytest.CaptureFixture[str]) -> None:
    assert entry.refuse_python(["serve", "nonce-1"], "3.8") == 1
    first, second = capfd.readouterr().out.splitlines()
    assert first == "RACKLESS nonce-1"
    event = decode(second.encode())
    assert isinstance(event, Event)
    assert event.kind == "fatal"
    assert event.data["kind"] == "user"
    assert event.data["message"] == ("python3 on this node is 3.8; Rackless needs 3.10 or newer")
    assert "apt-get install python3.10" in event.data["hint"]


def test_old_python_is_told_to_a_person(capfd: pytest.CaptureFixture[str]) -> None:
    assert entry.refuse_python(["record"], "3.9") == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "Rackless needs 3.10 or newer. Install a newer one" in err


def test_old_version_is_refused_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "OLDEST_PYTHON", (9, 0))
    assert entry.main(["serve", "n"]) == 1
    found = "{}.{}".format(*sys.version_info[:2])
    assert f"python3 on this node is {found}" in capfd.readouterr().out


class ArchivedAgent(Agent):
    """The real archive under `python3 -I`, as a node runs it."""

    def __init__(self, home: Path) -> None:
        archive = build_archive()
        folder = home / "agents"
        folder.mkdir(parents=True)
        path = folder / f"{archive.sha256}.zip"
        path.write_bytes(archive.data)
        self.sha256 = archive.sha256
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(path), "serve", "n1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "RACKLESS_AGENT_HOME": str(home)},
        )
        self.first = self.read_line()


def test_archive_serves_from_hello_to_samples(tmp_path: Path) -> None:
    agent = ArchivedAgent(tmp_path)
    hello = agent.read()
    assert agent.first == b"RACKLESS n1\n"
    assert hello["data"]["archive_sha256"] == agent.sha256
    facts = agent.ask("facts")["result"]
    assert facts["hostname"] == os.uname().nodename
    assert agent.ask("telemetry.follow", 7, after_s=0)["result"] == {}
    samples = [agent.read() for _ in range(2)]
    assert [s["kind"] for s in samples] == ["telemetry.sample"] * 2
    assert samples[0]["request_id"] == 7
    assert samples[1]["data"]["seq"] == samples[0]["data"]["seq"] + 1
    recorder = json.loads((tmp_path / "telemetry" / "recorder.json").read_text())["pid"]
    assert agent.end() == 0
    time.sleep(0.1)
    os.kill(recorder, 15)  # it outlives the connection


def test_no_stray_print_reaches_the_wire(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "home")
    agent.read()
    assert agent.ask("facts")["result"]["python"]
    out = os.readlink(f"/proc/{agent.process.pid}/fd/1")
    assert out == os.readlink(f"/proc/{agent.process.pid}/fd/2")
    agent.end()

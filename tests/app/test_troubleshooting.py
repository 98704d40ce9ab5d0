"""The troubleshooting page: complete sections, anchors that exist, and words that find them."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from app import errors
from app.cli.main import run
from app.provisioning.check_row import make_row
from app.troubleshooting import find_section, read_sections, search_sections, topic_of
from tests.import_graph import source_files

ROOT = Path(__file__).parents[2]
PARTS = ("Seen as", "Why", "Check", "Do")
SYMPTOMS = {
    "host-key-unknown": "authenticity of host can't be established",
    "host-key-changed": "REMOTE HOST IDENTIFICATION HAS CHANGED",
    "login-refused": "Permission denied (publickey,password)",
    "node-unreachable": "ssh no route to host",
    "address-changed": "pc has a new address after router restart",
    "node-not-ready": "python3: command not found",
    "shared-home": "NFS home shared by several PCs",
    "agent-folder-open": "can be written by other users",
    "node-answers-wrongly": "answer that no agent gives",
    "wsl": "WSL2 other nodes cannot connect",
    "wsl-stops": "wsl stops when I close the terminal",
    "wsl-sshd": "ssh in wsl refused after restart",
    "wsl-files": "home on /mnt/c slow",
    "sleep": "pc goes to sleep",
    "logout": "run ends when I log out",
    "machine-id": "cloned disk machine id",
    "sudo": "is not in the sudoers file",
    "shm": "bus error /dev/shm",
    "limits": "too many open files",
    "tmp": "compiler stops no space left in /tmp",
    "persistence": "nvidia-smi takes several seconds",
    "wsl-memory": "wsl out of memory free vram",
    "link": "connectFullMesh failed ping works",
    "network": "No network interface has the address",
    "all-reduce": "NCCL timeout watchdog",
    "loopback-name": "127.0.1.1",
    "mtu": "small messages pass, bulk hangs",
    "clock": "clocks differ ntp",
    "slow-link": "gigabit network slow",
    "gpu": "nvidia-smi: command not found",
    "variables": "CUDA_VISIBLE_DEVICES in bashrc",
    "gpu-too-new": "no kernel image is available for execution on the device",
    "unshipped-lock": "GTX 1080 needs the build cu126 of torch",
    "environment": "other versions of torch on one PC",
    "python": "different Python on nodes",
    "compiler": "Failed to find C compiler",
    "package-differs": "PACKAGES DO NOT MATCH THE HASHES",
    "no-wheel": "No matching distribution found",
    "no-index": "Failed to establish a new connection",
    "no-python": "packages of training need 3.11",
    "disk": "No space left on device",
    "does-not-fit": "13B does not fit",
    "data-refused": "rows are malformed json",
    "found-run": "found on a node, not yours",
    "gpu-in-use": "node is already busy",
    "model-download": "gated repo 401",
    "port-taken": "address already in use EADDRINUSE",
    "out-of-memory": "CUDA out of memory",
    "loss-not-finite": "loss is nan",
    "node-lost": "pc died power failure",
    "share-lost": "nas off stale file handle",
    "rank-stalled": "one gpu at 0 % others waiting",
    "rank-killed": "killed exit code 137",
    "supervisor-killed": "supervisor killed",
    "slow": "three PCs slower than one",
    "hot": "gpu temperature hot throttled",
    "stop-waits": "zombie processes kill -9 memory not freed",
    "run-stopped": "error run-stopped export",
    "resume-refuses": "resume does not fit this run",
    "checkpoint-damaged": "checkpoint corrupt damaged truncated",
    "checkpoint-no-room": "no room for a checkpoint",
    "master-disk-full": "disk of this pc full",
    "lock-held": "is in use by process",
    "store-lost": "database was damaged",
    "no-node-can-export": "no node can export",
    "verdict-not-keep": "quantized model worse",
    "no-display": "Could not load the Qt platform plugin xcb",
    "report": "internal error",
}
"""What a person would type, by the section that has to come first."""


def topics_in_code() -> dict[str, str]:
    """Return every topic that the code names as a constant, with its place."""
    found: dict[str, str] = {}
    for file in source_files(ROOT, "app", "agents"):
        where = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            value: ast.expr | None = None
            match node:
                case ast.keyword(arg="topic", value=value):
                    pass
                case ast.Assign(targets=[*_, ast.Name(id="topic")], value=value):
                    pass
            if isinstance(value, ast.Constant) and value.value:
                found[str(value.value)] = f"{where}:{value.lineno}"
    return found


def checks_in_code() -> dict[str, str]:
    """Return the name of every check that makes a row, with its place."""
    found: dict[str, str] = {}
    for file in source_files(ROOT, "app/provisioning"):
        where = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            value: ast.expr | None = None
            match node:
                case ast.Call(func=ast.Name(id="make_row"), args=[value, *_]):
                    pass
                case ast.keyword(arg="check", value=value):
                    pass
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[value.value] = f"{where}:{value.lineno}"
    return found


def test_every_check_has_a_section() -> None:
    checks = checks_in_code()
    assert len(checks) >= 30
    assert {name: where for name, where in checks.items() if find_section(name) is None} == {}


def test_every_section_has_signs_cause_check_and_remedy() -> None:
    sections = read_sections()
    assert len(sections) == len(SYMPTOMS)
    for section in sections:
        starts = [line.partition("**")[2].partition(":**")[0] for line in section.text.split("\n")]
        assert tuple(starts) == PARTS, section.topic
    counts = Counter(topic for section in sections for topic in section.topics)
    assert counts.most_common(1)[0][1] == 1, "an anchor leads to one place"


def test_every_topic_in_the_code_is_an_anchor_of_the_page() -> None:
    named = topics_in_code()
    assert len(named) >= 12
    assert {topic: where for topic, where in named.items() if find_section(topic) is None} == {}


@pytest.mark.parametrize(("topic", "words"), SYMPTOMS.items())
def test_a_symptom_finds_its_section_first(topic: str, words: str) -> None:
    assert search_sections(words)[0].topic == topic


def test_a_check_that_failed_leads_to_its_section() -> None:
    assert make_row("clock", "a", "warn", "late").topic == "clock"
    assert make_row("tcp", "a", "fail", "refused").topic == "link"
    assert make_row("clock", "a", "pass", "fine").topic == ""
    assert make_row("no-such-check", "a", "fail", "odd").topic == ""


def test_codes_of_errors_are_topics_where_there_is_a_section() -> None:
    kinds = [
        errors.HostKeyChanged("a", "b", "c"),
        errors.LoginRefused("no"),
        errors.NodeNotReady(""),
    ]
    assert [topic_of(kind.code) for kind in kinds] == [kind.topic for kind in kinds]
    assert errors.UserError("x", topic="mtu").topic == "mtu"
    assert errors.UsageError("x").topic == ""


def test_help_prints_a_section_a_list_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "host-key-changed"]) == 0
    assert "ssh-keygen -lf" in capsys.readouterr().out
    assert run(["help", "out", "of", "memory"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CUDA out of memory (out-of-memory)")
    assert "wsl-memory" in printed
    assert run(["help"]) == 0
    assert all(topic in capsys.readouterr().out for topic in ("mtu",))
    assert run(["help", "clock", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["topic"], row["area"]) == ("clock", "Checking")
    assert run(["help", "xylophone"]) == 1
    assert "rackless doctor" in capsys.readouterr().err


def test_an_error_names_its_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.cli.gui.has_display", lambda: False)
    assert run(["gui"]) == 1
    assert "more: rackless help no-display" in capsys.readouterr().err

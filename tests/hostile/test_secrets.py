"""Tokens, passwords and keys: no file, log, report, answer or argument list ever has them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.errors import ExpectedError
from agents.serve.server import describe_bug
from app.cli.main import run
from app.errors import AgentBug, UserError, describe_error
from app.gui.shell.crash_dialog import make_report
from tests.fakes.hub import open_hub

Attack = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
CANARY = "hf_" + "CaNaRy" * 5 + "wxyz"
PASSWORD = "corr3ct-horse"

SECRETS = {
    f"the hub said: token {CANARY} is not valid": CANARY,
    f"request headers: {{'authorization': 'Bearer {CANARY}x'}}": CANARY,
    "Authorization: Basic YW5uYTpodW50ZXIy": "YW5uYTpodW50ZXIy",
    f"cannot reach https://anna:{PASSWORD}@hub.example/api": PASSWORD,
    f"cannot reach anna:{PASSWORD}@10.0.0.2:22": PASSWORD,
    f"proxy http://proxy:{PASSWORD}@[fe80::1]:3128 refused": PASSWORD,
    f"password={PASSWORD}": PASSWORD,
    f'{{"api_key": "{PASSWORD}"}}': PASSWORD,
    f"https://s3.example/x?X-Amz-Signature={PASSWORD}&y=1": PASSWORD,
    "key: -----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----":
        "b3BlbnNzaC1rZXk",
    "ghp_" + "a1B2" * 9: "a1B2a1B2",
}  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_no_error_and_no_report_has_a_secret(text: str, attack: Attack) -> None:
    bug = describe_bug("node.facts", RuntimeError(text))
    told = {
        "a crash report": make_report(f"Traceback\n  RuntimeError: {text}"),
        "an error": describe_error(UserError(text, text)),
        "an error of a node": f"{ExpectedError(text, text)} {ExpectedError('', text).hint}",
        "a bug of a node": f"{bug.message} {bug.traceback}",
        "its answer here": f"{AgentBug(text, text)} {AgentBug(text, text).traceback}",
    }
    attack(given=text, tried="find it in errors and reports", happened=told["an error"])
    assert [name for name, said in told.items() if SECRETS[text] in said] == []


@pytest.mark.parametrize(
    "text",
    ["40 tokens: 5 per second", "node anna@10.0.0.2:22 is lost", "alpha:22, root@beta:22",
     "the token of the hub is missing: hf_ begins it", "a Bearer of news", "/data/hf_models/x",
     "secret sauce", "runs/2026:11:24 anna@alpha"],
)  # fmt: skip
def test_words_that_are_no_secret_stay(text: str) -> None:
    assert str(UserError(text)) == text


def test_a_fault_of_a_command_shows_no_secret(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attack: Attack,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(f"unexpected answer to Bearer {CANARY} from anna:{PASSWORD}@x.org")

    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path))
    monkeypatch.setattr("app.library.recipes.list_recipes", fail)
    for arguments in (["recipes", "list"], ["recipes", "list", "--json"]):
        run(arguments)
    said = "".join(capsys.readouterr())
    reports = "".join(path.read_text() for path in tmp_path.rglob("*.txt"))
    attack(given="a fault that quotes a token", tried="rackless recipes list", happened=said)
    assert "RuntimeError" in said
    assert CANARY not in said + reports
    assert PASSWORD not in said + reports


class Watch:
    """Reads the argument lists of all processes until it is stopped."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stop.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = path.read_bytes()
                except OSError:
                    continue
                if CANARY.encode() in line or PASSWORD.encode() in line:
                    self.found.append(line.replace(b"\0", b" ").decode("utf-8", "replace"))


def find_canary(folder: Path) -> list[str]:
    """Return the files that hold a canary, also the database and its journals."""
    marks = (CANARY.encode(), PASSWORD.encode())
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if any(mark in path.read_bytes() for mark in marks)]


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads argument lists in /proc")
def test_a_token_in_use_is_found_nowhere(tmp_path: Path, attack: Attack) -> None:
    """In files of master and agent, outputs and arguments, while commands use it and fail."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 40)
    (tmp_path / "run.yaml").write_text("model: org/private\ndata: {train: rows.jsonl}\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"weights")
    with open_hub() as hub, Watch() as watch:
        hub.status = 403
        environ = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "RACKLESS_HOME": str(tmp_path / "master"),
            "RACKLESS_AGENT_HOME": str(tmp_path / "agent"),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": CANARY,
            "HF_ENDPOINT": hub.address,
            "HF_HUB_OFFLINE": "0",
            "https_proxy": f"http://anna:{PASSWORD}@127.0.0.1:9",
        }
        said = ""
        for arguments in (
            ["nodes", "add", "here", "--local"],
            ["nodes", "token", "--json"],
            ["nodes", "token", "--give"],
            ["nodes", "add", "there", "--ssh", f"anna:{PASSWORD}@127.0.0.1:9"],
            ["plan", "run.yaml"],
            ["preview", "run.yaml", "--json"],
            ["start", "run.yaml"],
            ["artifacts", "add", "model"],
            ["artifacts", "push", "model", "anna/poems"],
            ["settings", "list", "--json"],
            ["nodes", "show", "here", "--json"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "app", *arguments],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=120,
            )
            said += done.stdout + done.stderr
    found = [*find_canary(tmp_path), *watch.found]
    # What this test itself typed on a command line is no leak.
    found = [one for one in found if "nodes add there" not in one]
    attack(given="a token that commands use", tried="find it", happened=f"{found} {said[-300:]}")
    assert found == []
    assert CANARY not in said
    assert PASSWORD not in said

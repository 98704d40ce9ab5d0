"""No program of ours imports a module that lies beside the caller's files.

The first test reads the source for every place that starts a program, so that a new one cannot be
forgotten; the others start them from a folder full of modules that would write a canary.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.launch import launch
from app.core.core import Core
from app.core.library import PreviewData, ReadRunFile
from app.core.new_nodes import AddNode
from app.core.nodes import ConnectNodes, SetUpNode
from app.demo import Demo
from app.errors import UserError
from app.gui.shell import demo_process
from app.nodes.node import LocalAddress
from app.nodes.transport.loopback import power_cut, start_loopback
from app.runfile.run_file import read_run_file
from tests.agents.supervisor.conftest import make_node
from tests.hostile.planted import NAMES, OURS, ROOT, copy_model, plant, ran, write_run_file

STARTS = {
    "subprocess": (
        *("Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    ),
    "os": (
        *("system", "popen", "posix_spawn", "posix_spawnp", "spawnv", "spawnve", "spawnl"),
        *("execv", "execve", "execvp", "execvpe", "execl", "execle", "execlp", "execlpe"),
    ),
    "": (
        *("create_subprocess_exec", "create_subprocess_shell", "subprocess_exec"),
        *("subprocess_shell", "startDetached", "QProcess"),
    ),
}
"""Functions that start a program, by the module that has them; those of any object last."""
NO_PYTHON = {
    "agents/node/facts.py": "ip and wslinfo",
    "app/nodes/transport/local.py": "the bootstrap, which starts `python3 -I`, and wsl.exe",
    "app/nodes/transport/loopback_session.py": "what a node's login shell would be given",
}
ISOLATED = "'-I'"


def find_starts() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call in our packages that starts a program."""
    for file in sorted([*(ROOT / "app").rglob("*.py"), *(ROOT / "agents").rglob("*.py")]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in (*STARTS.get(ast.unparse(node.func.value), ()), *STARTS[""])
            ):
                yield file.relative_to(ROOT).as_posix(), node


def test_every_start_of_a_program_says_where_it_imports_from() -> None:
    starts = list(find_starts())
    assert len(starts) >= 12, "the search for starts finds too little"
    assert {file for file, _ in starts} >= {*NO_PYTHON, "agents/children.py", "app/demo.py"}
    for file, call in starts:
        text = ast.unparse(call)
        if file in NO_PYTHON or text.startswith("os.execve("):
            continue
        given = {keyword.arg for keyword in call.keywords}
        assert "cwd" in given, f"{file}:{call.lineno} inherits the caller's folder: {text}"
        safe = "env" in given or ISOLATED in text
        assert safe, f"{file}:{call.lineno} inherits the caller's PYTHONPATH: {text}"


def test_every_python_of_a_set_up_is_isolated() -> None:
    """So are those in the commands that guides, hints and shortcuts name."""
    pattern = r"-m['\", ]+(?:pip|venv|ensurepip|PyInstaller)\b|[pP]ython\S* -c "
    found = []
    for file in (
        *(ROOT / "installers").glob("*.*"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "resources" / "help").glob("*.md"),
        *(ROOT / "app").rglob("*.py"),
        *(ROOT / "agents").rglob("*.py"),
        ROOT / "README.md",
    ):
        for line in file.read_text(encoding="utf-8").splitlines():
            if re.search(pattern, line) and not line.lstrip().startswith("#"):
                found.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert len(found) >= 12, "the search for set-ups finds too little"
    safe = ("-I", "isolated ")
    # The agent gives its children a safe folder and PYTHONSAFEPATH.
    loose = [f for f in found if not any(w in f for w in safe) and "agents/node/" not in f]
    assert loose == []


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in a folder full of planted modules, which PYTHONPATH and PYTHONSTARTUP name, too."""
    folder, canary = tmp_path / "trap", tmp_path / "canary"
    plant(folder, canary, *OURS, "answer")
    for name in ("data", "model"):
        plant(folder / name, canary)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", ".", str(folder), str(ROOT))))
    monkeypatch.setenv("PYTHONSTARTUP", str(folder / "json.py"))
    monkeypatch.setenv("PYTHONINSPECT", "")
    yield canary
    assert ran(canary) == ""


def rackless(folder: Path, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run our command in a folder, as `python -m app` does."""
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RACKLESS_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments", [("--version",), ("plan", "run.yaml"), ("preview", "run.yaml"), ("nodes",)]
)
def test_no_command_runs_a_module_of_the_current_folder(
    tmp_path: Path, attack: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    folder, canary = tmp_path / "data", tmp_path / "canary"
    write_run_file(folder)
    # Python itself looks for the one that runs modules, before any line of ours.
    plant(folder, canary)
    (folder / "pkgutil.py").unlink()
    for name in NAMES:
        (folder / "model" / f"{name}.py").write_bytes((folder / "json.py").read_bytes())
    done = rackless(folder, *arguments, home=tmp_path / "home")
    attack(
        given="modules named like ours beside a run file, its model and its data",
        tried=f"to run them in rackless {' '.join(arguments)}",
        happened=ran(canary) or f"none ran; exit code {done.returncode}",
    )
    assert ran(canary) == ""
    if arguments[0] == "preview":
        assert done.returncode == 0, done.stderr
        assert "Learned text" in done.stdout


def test_the_preview_of_data_runs_no_module_of_the_current_folder(
    trap: Path, tmp_path: Path
) -> None:
    spec_file = write_run_file(tmp_path / "run")

    async def preview() -> int:
        async with Core.open(tmp_path / "master") as core:
            spec = await core.do(ReadRunFile(path=spec_file))
            return (await core.do(PreviewData(spec=spec, whole=False))).num_rows

    assert asyncio.run(preview()) > 0
    assert ran(trap) == ""


def test_the_demo_starts_no_module_of_the_current_folder(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_process, "COMMAND", (*demo_process.COMMAND[:3], "--version"))
    asyncio.run(demo_process.run_demo_apart(None, lambda said: None))  # type: ignore[arg-type]
    assert ran(trap) == ""


def test_the_demo_asks_its_model_without_modules_of_the_current_folder(
    trap: Path, tmp_path: Path
) -> None:
    model = copy_model(tmp_path / "made")
    with pytest.raises(UserError, match="the same as before training"):
        asyncio.run(Demo(tmp_path / "demo")._ask(model))
    assert ran(trap) == ""


def test_a_loopback_node_runs_no_module_of_the_current_folder(trap: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pub"
    asyncssh.generate_private_key("ssh-ed25519").write_public_key(str(key))

    async def start() -> None:
        node = await start_loopback(tmp_path / "pc", key)
        power_cut(node.home)
        await node.process.wait()

    asyncio.run(start())
    assert ran(trap) == ""


def test_jobs_of_an_agent_run_no_module_of_the_current_folder(
    trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "agent"))
    run_file = write_run_file(tmp_path / "run")
    plant(run_file.parent, trap, *OURS)
    plant(run_file.parent / "model", trap, *OURS)

    async def preview() -> int:
        async with Core.open(tmp_path / "master") as core:
            await core.do(AddNode(name="here", address=LocalAddress()))
            await core.do(ConnectNodes())
            await core.do(SetUpNode(name="here", python=sys.executable))
            spec = await core.do(ReadRunFile(path=run_file))
            return (await core.do(PreviewData(spec=spec, node="here", whole=False))).num_rows

    assert asyncio.run(preview()) == 40
    assert ran(trap) == ""


def test_a_rank_runs_no_module_of_a_model_data_or_current_folder(
    trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_run_file(tmp_path / "run")
    plant(run_file.parent, trap)
    plant(run_file.parent / "model", trap)
    spec = read_run_file(run_file)
    for node in make_node(tmp_path, monkeypatch):
        intent = replace(
            node.intent("train"),
            spec=spec,
            python=sys.executable,
            model_path=str(run_file.parent / "model"),
            train_path=str(run_file.parent / "train.jsonl"),
            environ={"PYTHONPATH": str(tmp_path / "trap"), "PYTHONSTARTUP": "json.py"},
        )
        launch(node.home, intent)
        attempt = AttemptFolder(node.home, intent.run_id, intent.attempt)
        plant(attempt.folder, trap, *OURS)
        status = node.wait_end(attempt, 90.0)
        assert status.state == "done", attempt.file("rank-0.log").read_text()
    assert ran(trap) == ""

"""`installers/setup.ps1` on an imitation of Windows: what it makes, finds again and removes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.powershell.fake_windows import FakeWindows
from tests.powershell.interpreter import Command, Failure, Interpreter

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / "installers" / "setup.ps1").read_text(encoding="ascii")
LISTED = [
    " -V:3.15          C:\\Python315\\python.exe",
    " -V:3.12 *        {python}",
    " -V:3.11-32       {old}",
]


class FakePc(FakeWindows):
    """A PC without Rackless."""

    def __init__(self, folder: Path, has_python: bool = True) -> None:
        super().__init__(folder=folder)
        self.python = folder / "Python312/python.exe"
        self.old = folder / "Python311-32/python.exe"
        self.path = "%USERPROFILE%\\bin;C:\\Tools"
        self.versions = {str(self.python): "3 12 64", str(self.old): "3 11 32"}
        self.has_python, self.has_winget, self.pip_code = has_python, True, 0
        self.pip: list[list[str]] = []
        self.ran: list[list[str]] = []
        for path in (self.python, self.old):
            path.parent.mkdir()
            path.touch()

    def start(self, **parameters: Any) -> tuple[int, list[Any]]:
        return self.run(SCRIPT, **parameters)

    def _start(self) -> Interpreter:
        one = super()._start()
        one.environ["APPDATA"] = str(self.folder / "Roaming")
        one.scopes[0]["psscriptroot"] = str(ROOT / "installers")
        return one

    def commands(self) -> dict[str, Command]:
        def find(named: dict[str, Any], words: list[Any], piped: list[Any]) -> Any:
            known = {"py.exe": self.has_python, "winget.exe": self.has_winget}
            return SimpleNamespace(Source=named["name"]) if known.get(named["name"]) else None

        def set_path(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
            assert (named["name"], named["type"]) == ("Path", "ExpandString")
            self.path = named["value"]

        def remove(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
            path = Path(named["literalpath"])
            shutil.rmtree(path) if path.is_dir() else path.unlink()

        def split(named: dict[str, Any], words: list[Any], piped: list[Any]) -> str:
            return str(Path(named["path"]).parent)

        split.switches = {"parent"}  # type: ignore[attr-defined]
        remove.switches = {"recurse", "force"}  # type: ignore[attr-defined]
        return {
            **super().commands(),
            "Get-Command": find,
            "Get-FileHash": lambda named, words, piped: SimpleNamespace(
                Hash=hashlib.sha256(Path(named["literalpath"]).read_bytes()).hexdigest()
            ),
            "Get-Item": lambda named, words, piped: SimpleNamespace(
                GetValue=lambda name, default, how: self.path
            ),
            "Set-ItemProperty": set_path,
            "Split-Path": split,
            "Remove-Item": remove,
        }

    def statics(self) -> dict[str, Any]:
        return {
            **super().statics(),
            "Environment::SetEnvironmentVariable": lambda name, value, target: None,
        }

    def _new_object(self, named: dict[str, Any], words: list[Any], piped: list[Any]) -> Any:
        if "comobject" not in named:
            return super()._new_object(named, words, piped)

        def create(path: str) -> Any:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            link = Link(path)
            link.Save = lambda: Path(path).write_text(f"{link.TargetPath} {link.Arguments}")
            return link

        return SimpleNamespace(CreateShortcut=create)

    def _native(self, named: dict[str, Any], words: list[Any], piped: list[Any]) -> list[str]:
        program, words = named["program"], [str(word) for word in words]
        self._interpreter.scopes[0]["lastexitcode"] = 0
        if program == "py.exe":
            return [line.format(python=self.python, old=self.old) for line in LISTED]
        if program == "winget.exe":
            place = self.folder / "Users/ann/AppData/Local/Programs/Python/Python313/python.exe"
            place.parent.mkdir(parents=True)
            place.touch()
            self.versions[str(place)] = "3 13 64"
            return []
        if program.endswith("wsl.exe"):
            self.ran.append(words)
            self._interpreter.scopes[0]["lastexitcode"] = 3
            return []
        assert words.pop(0) == "-I", "a module of the current folder could run"
        if words[0] == "-c":
            return [self.versions.get(program, "")]
        if words[:2] == ["-m", "venv"]:
            (Path(words[2]) / "Scripts").mkdir(parents=True)
            return []
        assert words[:3] == ["-m", "pip", "install"], words
        assert "--no-deps" in words
        self.pip.append(words)
        self._interpreter.scopes[0]["lastexitcode"] = self.pip_code
        return []


class Link:
    """A shortcut, as WScript.Shell makes it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def set_member(self, name: str, value: Any) -> None:
        setattr(self, name, value)


@pytest.fixture
def pc(tmp_path: Path) -> FakePc:
    return FakePc(tmp_path)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_all_is_set_up_once_and_removed(pc: FakePc) -> None:
    before = files_below(pc.folder)
    pc.answers = ["y"]
    assert pc.start()[0] == 0, pc.said
    app, tools, own = pc.pip
    assert app[-2:] == ["--requirement", str(ROOT / "installers/app.lock")]
    assert {"--require-hashes", "--only-binary", ":all:"} <= set(app) & set(tools)
    locked = Path(tools[-1]).read_text().splitlines()
    assert locked[0].startswith("setuptools==")
    assert all(line.startswith("    --hash=sha256:") for line in locked[1:])
    assert own[-2:] == ["--editable", str(ROOT)]
    assert "--no-index" in own
    bin_folder = pc.folder / "Users/ann/AppData/Local/Programs/Rackless/bin"
    launcher = (bin_folder / "rackless.cmd").read_bytes()
    assert launcher == b'@"%~dp0..\\venv\\Scripts\\rackless.exe" %*\r\n'
    assert pc.path == f"%USERPROFILE%\\bin;C:\\Tools;{bin_folder}"
    assert pc.start()[0] == 0
    assert len(pc.pip) == 3
    assert "All is set up already" in pc.said[-1]
    assert pc.start(Undo=True)[0] == 0
    assert pc.path == "%USERPROFILE%\\bin;C:\\Tools"
    assert files_below(pc.folder) == before


def test_a_no_and_a_dry_run_change_nothing(pc: FakePc) -> None:
    before = files_below(pc.folder)
    assert pc.start()[0] == 1
    code, output = pc.start(DryRun=True)
    assert code == 0
    plan = json.loads(output[0])
    assert plan["python"] == {"path": str(pc.python), "version": "3.12"}
    ids = [change["id"] for change in plan["changes"]]
    assert ids == ["environment", "command", "path", "shortcut"]
    assert (files_below(pc.folder), pc.pip) == (before, [])


def test_python_comes_through_winget_where_there_is_none(tmp_path: Path) -> None:
    pc = FakePc(tmp_path, has_python=False)
    assert pc.start(Yes=True)[0] == 0, pc.said
    assert any("Install Python through winget" in line for line in pc.said)
    without = FakePc(tmp_path / "other", has_python=False)
    without.has_winget = False
    assert without.start(Yes=True)[0] == 1
    assert "https://www.python.org/downloads" in without.said[-1]


def test_a_set_up_that_broke_off_begins_anew(pc: FakePc) -> None:
    pc.pip_code = 1
    assert pc.start(Yes=True)[0] == 1
    assert "pip could not install window and command line" in pc.said[-1]
    pc.pip_code = 0
    assert pc.start(Yes=True)[0] == 0
    assert len(pc.pip) == 4


@pytest.mark.parametrize("job", ["demo", "test"])
def test_what_needs_linux_runs_in_wsl(pc: FakePc, job: str) -> None:
    assert pc.start(Job=job)[0] == 3  # the exit code of what ran there
    ((*start, command),) = pc.ran
    assert start == ["--cd", str(ROOT), "--exec", "sh", "-c"]
    assert command == f"RACKLESS_VENV=$HOME/.cache/rackless-venv sh installers/setup.sh {job}"
    assert pc.start(Job="dance")[0] == 2


def test_a_file_in_use_is_said(pc: FakePc, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pc.start(Yes=True)[0] == 0

    def refuse(*_: object) -> None:
        raise Failure("Access to the path is denied.")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert pc.start(Undo=True)[0] == 1
    assert "Close Rackless and run this again" in pc.said[-1]

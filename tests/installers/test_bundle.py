"""The desktop bundle: its inputs, its entry, and behind a mark the bundle itself.

pytest -m campaign tests/installers/test_bundle.py      builds and starts it: some five minutes
"""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source
from agents.shared.packages.lock import read_lock_text
from app.cli import self_test
from tests.import_graph import imports_of, source_files

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "installers" / "bundle"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bundle_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load(ROOT / "installers" / "bundle.py")


def spec_values() -> Mapping[str, list[str]]:
    """Return the lists of strings that the spec assigns, by name."""
    tree = ast.parse((BUNDLE / "rackless.spec").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            found[node.targets[0].id] = [text for text in texts if isinstance(text, str)]
    return found


def run_entry(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**python_environ(os.environ, *(same_source() or (str(ROOT),))), **variables}
    return subprocess.run(
        [sys.executable, str(BUNDLE / "entry.py"), *arguments],
        env=environ,
        cwd=SAFE_FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_the_spec_leaves_out_is_not_imported_by_the_app() -> None:
    left_out = set(spec_values()["excludes"])
    assert {"torch", "tkinter", "PySide6.QtQml"} <= left_out
    used = {found.name for file in source_files(ROOT, "app") for found in imports_of(ROOT, file)}
    wrong = [name for name in used for one in left_out if name == one or name.startswith(f"{one}.")]
    assert wrong == []


def test_children_of_the_app_are_modules_that_the_bundle_can_run() -> None:
    """The bundle's program is no interpreter: of its options it knows `-m` alone."""
    wrong = []
    for file in source_files(ROOT, "app"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.Tuple, ast.List)) or len(node.elts) < 2:
                continue
            first, second = node.elts[:2]
            if ast.unparse(first) == "sys.executable" and ast.unparse(second) != "'-m'":
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_the_entry_runs_commands_and_modules_and_frees_children() -> None:
    assert run_entry("--version").stdout.startswith("rackless ")
    shown = run_entry("-m", "json.tool", "--help")
    assert "usage" in shown.stdout
    assert run_entry("-m", "app.nodes.transport.loopback").returncode == 2
    entry = load(BUNDLE / "entry.py")
    before = dict(os.environ)
    try:
        os.environ.update(LD_LIBRARY_PATH="/opt/rackless/_internal", LD_LIBRARY_PATH_ORIG="/own")
        entry.free_children()
        assert os.environ["LD_LIBRARY_PATH"] == "/own"
        entry.free_children()
        assert "LD_LIBRARY_PATH" not in os.environ
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_the_package_describes_itself(maker: ModuleType) -> None:
    if shutil.which("dpkg"):
        control = maker.control_text(123 << 20)
        fields = dict(line.split(": ", 1) for line in control.splitlines() if line[0] != " ")
        assert fields["Version"] == maker.version()
        assert fields["Installed-Size"] == str(123 << 10)
        assert all(
            re.fullmatch(r"[a-z0-9.+ |()>=-]+", one) for one in fields["Depends"].split(", ")
        )
    entry = configparser.ConfigParser(interpolation=None)
    entry.optionxform = str  # type: ignore[assignment,method-assign]
    entry.read(BUNDLE / "rackless.desktop")
    assert entry["Desktop Entry"]["Exec"] == "/usr/bin/rackless"
    assert (ROOT / "resources" / "icons" / f"{entry['Desktop Entry']['Icon']}.svg").exists()


def test_the_locks_hold_all_that_the_bundle_is_built_with(maker: ModuleType) -> None:
    locks = [read_lock_text(path.read_text()) for path in maker.LOCKS]
    names = {package.name for lock in locks for package in lock.packages}
    assert {"pyinstaller", "pyinstaller-hooks-contrib", "setuptools", "pyside6-essentials"} <= names


def test_a_part_that_fails_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(home: Path) -> str:
        raise self_test.Failed("a library is missing")

    monkeypatch.setenv("RACKLESS_AGENT_HOME", os.environ["RACKLESS_AGENT_HOME"])
    for name in ("_import_all", "_start_agent"):
        monkeypatch.setattr(self_test, name, lambda home: "left out here")
    monkeypatch.setattr(self_test, "_open_window", break_down)
    assert self_test.test_self() == 1
    printed = capsys.readouterr().out
    assert "FAILED window: Failed: a library is missing" in printed
    assert printed.count("ok    ") == 6


@pytest.mark.campaign
def test_the_bundle_is_built_and_passes_its_self_test(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "installers" / "bundle.py"), "--out", str(tmp_path / "dist")],
        cwd=ROOT,
        env=python_environ(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "self-test passed" in done.stdout
    program = tmp_path / "dist" / "rackless" / "rackless"
    home = {"RACKLESS_HOME": str(tmp_path / "home")}
    report = subprocess.run(
        [str(program), "doctor", "--json", "--out", str(tmp_path / "r.zip")],
        cwd=SAFE_FOLDER,
        env={**os.environ, **home},
        capture_output=True,
        check=True,
    )
    assert json.loads(report.stdout)["parts"]
    if sys.platform.startswith("linux"):
        (package,) = (tmp_path / "dist").glob("rackless_*.deb")
        listed = subprocess.run(
            ["dpkg-deb", "--contents", str(package)], capture_output=True, text=True, check=True
        ).stdout
        for path in ("usr/bin/rackless -> /opt/rackless", "rackless.desktop", "rackless.svg"):
            assert path in listed

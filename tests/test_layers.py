"""Walk every import of the project and hold it against the layers of ARCHITECTURE.md.

Imports inside functions and under TYPE_CHECKING count like any other, and so do
`importlib.import_module("...")` and `__import__("...")` with a literal name. A violation names
file, line and rule. The rules themselves are tried on samples that break them.
"""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
QT = ("PySide6", "shiboken6", "pyqtgraph")
TORCH = (
    "torch", "transformers", "peft", "safetensors", "bitsandbytes", "tokenizers", "accelerate",
    "cudnn",
)  # fmt: skip
TORCH_FOLDERS = ("agents.trainer", "agents.quantizers")
SHARED_WITH_APP = ("agents.contract",)
INPUT_OUTPUT = (
    *("asyncio", "socket", "selectors", "ssl", "subprocess", "multiprocessing", "signal"),
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "fcntl", "mmap", "sqlite3", "asyncssh"),
    *("urllib", "http", "yaml", "logging", "threading", "concurrent"),
)
NEWER_THAN_3_10 = {
    "asyncio": {"TaskGroup", "timeout", "timeout_at", "Runner", "Barrier"},
    "builtins": {"ExceptionGroup", "BaseExceptionGroup"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "verify", "member", "nonmember"},
    "typing": {"Self", "Never", "LiteralString", "Required", "NotRequired", "override", "Unpack"},
}
MAX_CLASS_LINES = 250
LAYERS = {"app.core": 2, "app.demo": 2, "app.cli": 3, "app.gui": 3, "app.__main__": 3}
"""Folders of app/ that are not here are services (1), single files the domain (0)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported name, `from a.b import c` as `a.b.c`, and where it stands."""

    path: str
    line: int
    module: str
    """The module that imports, such as `app.runs.lifecycle.launch`."""
    name: str


def within(name: str, *packages: str) -> bool:
    """Tell whether `name` is one of the packages or lies below it."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def source_files(root: Path, *folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (root / folder).rglob("*.py"))


def module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the absolute names that one syntax node imports; `package` resolves relative ones."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=source, names=names, level=level):
            base = package.split(".")[: -(level - 1) or None] if level else []
            stem = ".".join([*base, *([source] if source else [])])
            yield from (f"{stem}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


@functools.cache
def imports_of(root: Path, file: Path) -> tuple[Import, ...]:
    """Return what a file imports; read once for all rules."""
    module = module_name(root, file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(
        Import(
            path=file.relative_to(root).as_posix(),
            line=getattr(node, "lineno", 0),
            module=module,
            name=name,
        )
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in imported_names(node, package)
    )


def layer_of(root: Path, name: str) -> int:
    """Return the layer of a module of app/: domain 0, services 1, core 2, front ends 3."""
    for known, layer in LAYERS.items():
        if within(name, known):
            return layer
    first = name.split(".")[1] if "." in name else ""
    return 1 if (root / "app" / first).is_dir() and first else 0


def third_party_in_agent(found: Import) -> bool:
    first = found.name.split(".")[0]
    return first not in sys.stdlib_module_names and first not in ("agents", "pynvml", "__future__")


RULES: dict[str, Callable[[Path, Import], bool]] = {
    "agents never imports app": lambda _, i: within(i.module, "agents") and within(i.name, "app"),
    "app imports from agents only the contract": lambda _, i: (
        within(i.module, "app")
        and within(i.name, "agents")
        and not within(i.name, *SHARED_WITH_APP)
    ),
    "only app/gui imports Qt": lambda _, i: within(i.name, *QT) and not within(i.module, "app.gui"),
    "only app/nodes imports asyncssh": lambda _, i: (
        within(i.name, "asyncssh") and not within(i.module, "app.nodes")
    ),
    "only app/storage imports sqlite3": lambda _, i: (
        within(i.name, "sqlite3") and not within(i.module, "app.storage")
    ),
    "only agents/trainer and agents/quantizers import torch": lambda _, i: (
        within(i.name, *TORCH) and not within(i.module, *TORCH_FOLDERS)
    ),
    "the rest of agents has the standard library and pynvml only": lambda _, i: (
        within(i.module, "agents")
        and not within(i.module, *TORCH_FOLDERS)
        and third_party_in_agent(i)
    ),
    "the rest of agents does not import the trainer or the quantizers": lambda _, i: (
        within(i.module, "agents")
        and not within(i.module, *TORCH_FOLDERS)
        and within(i.name, *TORCH_FOLDERS)
    ),
    "app/planning and app/flows do no input or output": lambda _, i: (
        within(i.module, "app.planning", "app.flows") and within(i.name, *INPUT_OUTPUT)
    ),
    "arrows point leftwards: domain <- services <- core <- gui, cli": lambda root, i: (
        within(i.module, "app")
        and within(i.name, "app")
        and layer_of(root, i.name) > layer_of(root, i.module)
    ),
}


def violations(root: Path, rule: str) -> list[str]:
    """Return `file:line imports name` for every import below `root` that breaks the rule."""
    return [
        f"{found.path}:{found.line} imports {found.name}"
        for file in source_files(root, "app", "agents")
        for found in imports_of(root, file)
        if RULES[rule](root, found)
    ]


def opened_files(root: Path) -> list[str]:
    """Return where pure code calls `open` or `print`, which need no import."""
    return [
        f"{file.relative_to(root).as_posix()}:{node.lineno} calls {node.func.id}"
        for file in source_files(root, "app/planning", "app/flows")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("open", "print", "input")
    ]


def too_new_names(node: ast.AST) -> Iterator[str]:
    """Yield the names in one syntax node that Python 3.10 does not have."""
    match node:
        case ast.Import(names=names) if any(alias.name == "tomllib" for alias in names):
            yield "tomllib"
        case ast.ImportFrom(module=source, names=names) if source in NEWER_THAN_3_10:
            yield from (alias.name for alias in names if alias.name in NEWER_THAN_3_10[source])
        case ast.Attribute(value=ast.Name(id=source), attr=name):
            if name in NEWER_THAN_3_10.get(source, ()):
                yield f"{source}.{name}"
        case ast.Name(id=name) if name in NEWER_THAN_3_10["builtins"]:
            yield name


def newer_python(root: Path) -> list[str]:
    """Return where agents/ uses what Python 3.10 does not have."""
    found = []
    for file in source_files(root, "agents"):
        where = file.relative_to(root).as_posix()
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))
        except SyntaxError as error:
            found.append(f"{where}:{error.lineno} {error.msg}")
            continue
        found += [
            f"{where}:{getattr(node, 'lineno', 0)} uses {name}"
            for node in ast.walk(tree)
            for name in too_new_names(node)
        ]
    return found


def project_files(root: Path) -> list[Path]:
    """Return the files that git tracks or would track; without git, all in the folders."""
    if not (shutil.which("git") and (root / ".git").exists()):
        return untracked_tree(root)
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    names = listed.stdout.decode().split("\0")
    return [root / name for name in names if name and (root / name).is_file()]


def untracked_tree(root: Path) -> list[Path]:
    folders = ("app", "agents", "tests", "installers", "resources")
    files = [file for folder in folders for file in (root / folder).rglob("*") if file.is_file()]
    return [file for file in files if "__pycache__" not in file.parts]


def own_paths() -> list[str]:
    """Return the paths of this machine that no file of the project may contain."""
    candidates = {str(ROOT), sys.prefix, str(Path.home())}
    return sorted(candidates - {"/", "/usr", "/usr/local", "/root"})


@pytest.mark.parametrize("rule", RULES)
def test_imports_keep_the_layers(rule: str) -> None:
    assert violations(ROOT, rule) == [], rule


def test_pure_code_opens_nothing() -> None:
    assert opened_files(ROOT) == []


def test_agents_run_on_python_3_10() -> None:
    assert newer_python(ROOT) == []


def test_code_is_ascii() -> None:
    code = [f for f in project_files(ROOT) if f.suffix in (".py", ".sh", ".ps1", ".toml")]
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in code
        for number, line in enumerate(file.read_bytes().splitlines(), 1)
        if not line.isascii()
    ]
    assert found == []


def test_every_module_says_its_job() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in source_files(ROOT, "app", "agents", "tests", "resources")
        if file.stat().st_size and not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ]
    assert silent == []


def test_no_file_names_a_path_of_this_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)} contains {path}"
        for file in project_files(ROOT)
        for path in own_paths()
        if path.encode() in file.read_bytes()
    ]
    assert found == []


SAMPLES = [
    (
        "agents never imports app",
        "agents/serve/server.py",
        "def f():\n    from app import errors\n",
        2,
    ),
    (
        "app imports from agents only the contract",
        "app/core/core.py",
        "import agents\n",
        1,
    ),
    (
        "app imports from agents only the contract",
        "app/nodes/bootstrap.py",
        "from agents import contract, server\n",
        1,
    ),
    (
        "only app/gui imports Qt",
        "app/runs/lifecycle/launch.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PySide6.QtCore import Qt\n",
        3,
    ),
    (
        "only app/gui imports Qt",
        "app/cli/gui.py",
        "import importlib\nimportlib.import_module('pyqtgraph')\n",
        2,
    ),
    ("only app/nodes imports asyncssh", "app/runs/lifecycle/watch.py", "import asyncssh.misc\n", 1),
    ("only app/storage imports sqlite3", "app/core/core.py", "x = __import__('sqlite3')\n", 1),
    (
        "only agents/trainer and agents/quantizers import torch",
        "app/planning/memory/forecast.py",
        "import torch.nn as nn\n",
        1,
    ),
    (
        "the rest of agents has the standard library and pynvml only",
        "agents/telemetry/gpu.py",
        "import os, psutil\n",
        1,
    ),
    (
        "the rest of agents does not import the trainer or the quantizers",
        "agents/handlers.py",
        "def f():\n    from agents.trainer.checkpoint.folder import read\n",
        2,
    ),
    (
        "app/planning and app/flows do no input or output",
        "app/flows/add_node.py",
        "import math\nfrom os import path\n",
        2,
    ),
    (
        "arrows point leftwards: domain <- services <- core <- gui, cli",
        "app/runs/lifecycle/resume.py",
        "from ... import core\n",
        1,
    ),
    (
        "arrows point leftwards: domain <- services <- core <- gui, cli",
        "app/errors.py",
        "from app.runs.run import Run\n",
        1,
    ),
]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(("rule", "path", "text", "line"), SAMPLES)
def test_each_rule_names_a_sample_that_breaks_it(
    tmp_path: Path, rule: str, path: str, text: str, line: int
) -> None:
    write(tmp_path, "app/runs/__init__.py", "")
    write(tmp_path, path, text)

    found = violations(tmp_path, rule)

    assert len(found) == 1
    assert found[0].startswith(f"{path}:{line} ")


def test_allowed_imports_break_no_rule(tmp_path: Path) -> None:
    write(
        tmp_path, "app/gui/session/bridge.py", "from PySide6 import QtCore\nfrom app import core\n"
    )
    write(
        tmp_path,
        "app/nodes/transport/connection.py",
        "import asyncssh\nfrom agents.contract.wire import to_wire\n",
    )
    write(tmp_path, "app/storage/database.py", "import sqlite3\nfrom app.errors import UserError\n")
    write(
        tmp_path,
        "app/core/core.py",
        "from app.runs import run\nfrom agents.contract.messages import Hello\n",
    )
    write(tmp_path, "app/runs/run.py", "from app import events\nfrom . import launch\n")
    write(
        tmp_path, "app/planning/plan.py", "import math\nfrom agents.contract.spec import RunSpec\n"
    )
    write(tmp_path, "agents/trainer/loop.py", "import torch\nimport safetensors.torch\n")
    write(
        tmp_path,
        "agents/telemetry/gpu.py",
        "import pynvml\nfrom agents.contract.messages import Hello\n",
    )

    assert {rule: violations(tmp_path, rule) for rule in RULES} == {rule: [] for rule in RULES}


def test_open_in_pure_code_is_found(tmp_path: Path) -> None:
    write(tmp_path, "app/planning/plan.py", "def f():\n    return open('x')\n")
    assert opened_files(tmp_path) == ["app/planning/plan.py:2 calls open"]


@pytest.mark.parametrize(
    "text",
    [
        "try: pass\nexcept* OSError:\n    pass\n",
        "\nimport asyncio\nasyncio.timeout(1)\n",
        "\n\nfrom typing import Self\n",
        "\n\nimport tomllib\n",
    ],
)
def test_newer_python_in_agents_is_found(tmp_path: Path, text: str) -> None:
    write(tmp_path, "agents/node/files.py", text)
    assert [line.split()[0] for line in newer_python(tmp_path)] == ["agents/node/files.py:3"]


def test_no_class_of_the_window_is_long():
    long = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in source_files(ROOT, "app/gui")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_CLASS_LINES
    ]
    assert long == []

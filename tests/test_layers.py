"""Check every import of the project against the rules and the orders of ARCHITECTURE.md.

A violation names file, line and rule. Each rule is tested on a sample that breaks it.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.import_graph import (
    Import,
    circles,
    file_graph,
    folder_graph,
    imports_of,
    source_files,
    unplaced,
    upward_imports,
    within,
)

ROOT = Path(__file__).resolve().parent.parent
QT = ("PySide6", "shiboken6", "pyqtgraph")
TORCH = (
    "torch", "transformers", "peft", "safetensors", "bitsandbytes", "tokenizers", "accelerate",
    "cudnn",
)  # fmt: skip
TORCH_FOLDERS = ("agents.trainer", "agents.quantizers")
SHARED_WITH_APP = ("agents.contract", "agents.shared")
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
ORDER = {
    "app": (
        "text shell_words troubleshooting program errors paths filelock progress"
        " | settings private_home artifact conversation interruption"
        " | planning runfile | events | presentation hub integrations storage"
        " | library nodes telemetry | provisioning | runs | forecasts data recovery scheduling"
        " | artifacts | chats flows | core | demo doctor | gui cli"
        " | __main__"
    ),
    "app.nodes": (
        "node archive credential endpoints own_address"
        " | ssh_config | ssh_hosts transport discovery"
        " | bootstrap | channel | link | client watch identity finder key_copy wake shared_homes"
        " | fleet files"
    ),
    "app.planning": (
        "shape row_lengths | memory | hardware accuracy layer_costs setting_search"
        " | candidate throughput | choice plan_context split | build_context subsets"
        " | document strategies | cut reasons quick | advice upgrades best | refused | plan"
    ),
    "app.runs": (
        "placement run | nodes rejoin | recovery mandates | journals | snapshot | run_repository"
        " | services | * | inputs | lifecycle"
    ),
    "app.gui": (
        "kit | session tables logs | charts forms | repairs | chat new_run nodes settings"
        " | data export | runs"
        " | artifacts overview | shell | application | self_test"
    ),
    "agents": (
        "contract | shared | errors | foreign_code | state disk_space limits children program"
        " file_hashes | rendezvous | supervisor | telemetry | node | election"
        " | spread serve trainer | quantizers | commands | __main__"
    ),
    "agents.trainer": (
        "rank kernels data optim | streaming | model metrics | objectives | execution | parallel"
        " | checkpoint | *"
    ),
}
"""Groups of the files and folders of a package: each imports from its own group and from those to
the left. `*` is everything that the order does not name."""


OF_AGENT = ("agents", "packaging", "pynvml", "__future__")
"""Modules in the archive that nodes get, and what is no module."""


def third_party_in_agent(found: Import) -> bool:
    first = found.name.split(".")[0]
    return first not in sys.stdlib_module_names and first not in OF_AGENT


RULES: dict[str, Callable[[Import], bool]] = {
    "agents never imports app": lambda i: within(i.module, "agents") and within(i.name, "app"),
    "app imports from agents only contract and shared": lambda i: (
        within(i.module, "app")
        and within(i.name, "agents")
        and not within(i.name, *SHARED_WITH_APP)
    ),
    "only app/gui imports Qt": lambda i: within(i.name, *QT) and not within(i.module, "app.gui"),
    "only app/nodes imports asyncssh": lambda i: (
        within(i.name, "asyncssh") and not within(i.module, "app.nodes")
    ),
    "only app/storage imports sqlite3": lambda i: (
        within(i.name, "sqlite3") and not within(i.module, "app.storage")
    ),
    "only agents/trainer and agents/quantizers import torch": lambda i: (
        within(i.name, *TORCH) and not within(i.module, *TORCH_FOLDERS)
    ),
    "the rest of agents has the standard library and its archive only": lambda i: (
        within(i.module, "agents")
        and not within(i.module, *TORCH_FOLDERS)
        and third_party_in_agent(i)
    ),
    "the rest of agents does not import the trainer or the quantizers": lambda i: (
        within(i.module, "agents")
        and not within(i.module, *TORCH_FOLDERS)
        and within(i.name, *TORCH_FOLDERS)
    ),
    "app/planning and app/flows do no input or output": lambda i: (
        within(i.module, "app.planning", "app.flows") and within(i.name, *INPUT_OUTPUT)
    ),
}


def violations(root: Path, rule: str) -> list[str]:
    """Return `file:line imports name` for every import below `root` that breaks the rule."""
    return [
        str(found)
        for file in source_files(root, "app", "agents")
        for found in imports_of(root, file)
        if RULES[rule](found)
    ]


def lines_of(found: list[list[Import]]) -> list[list[str]]:
    """Return the lines that close each circle."""
    return [[str(line) for line in circle] for circle in found]


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
def test_imports_keep_the_rules(rule: str) -> None:
    assert violations(ROOT, rule) == [], rule


@pytest.mark.parametrize(("package", "order"), ORDER.items())
def test_every_child_of_an_ordered_package_has_a_place(package: str, order: str) -> None:
    assert unplaced(ROOT, package, order) == []


@pytest.mark.parametrize(("package", "order"), ORDER.items())
def test_imports_keep_the_order(package: str, order: str) -> None:
    assert [str(found) for found in upward_imports(ROOT, package, order)] == []


@pytest.mark.parametrize("package", ORDER)
def test_no_folder_imports_in_a_circle(package: str) -> None:
    assert lines_of(circles(folder_graph(ROOT, package))) == []


@pytest.mark.parametrize("package", ["app", "agents"])
def test_no_file_imports_in_a_circle(package: str) -> None:
    assert lines_of(circles(file_graph(ROOT, package))) == []


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
    ("app imports from agents only contract and shared", "app/core/core.py", "import agents\n", 1),
    (
        "app imports from agents only contract and shared",
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
        "the rest of agents has the standard library and its archive only",
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


@pytest.mark.parametrize(
    ("package", "path", "text"),
    [
        ("app", "app/errors.py", "\nfrom app.runs.run import Run\n"),
        ("app", "app/runs/lifecycle/resume.py", "\nfrom ... import core\n"),
        ("app", "app/runs/run.py", "\ndef f():\n    from app.core.core import Core\n"),
        ("app.gui", "app/gui/kit/theme.py", "if TYPE_CHECKING:\n    from app.gui.shell import x\n"),
        ("app.runs", "app/runs/run.py", "\nfrom app.runs.inputs.preview import read_preview\n"),
        ("agents.trainer", "agents/trainer/rank/context.py", "\nimport agents.trainer.loop\n"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, package: str, path: str, text: str) -> None:
    for other in ("app/core/core.py", "app/gui/shell/x.py", "app/runs/run.py"):
        write(tmp_path, other, "")
    write(tmp_path, "app/runs/inputs/preview.py", "")
    write(tmp_path, "agents/trainer/loop.py", "from agents.trainer.rank import context\n")
    write(tmp_path, path, text)

    found = upward_imports(tmp_path, package, ORDER[package])

    assert [str(i).split()[0] for i in found] == [f"{path}:{text.count(chr(10))}"]


def test_a_new_folder_needs_a_place_in_the_order(tmp_path: Path) -> None:
    write(tmp_path, "app/gui/kit/theme.py", "")
    write(tmp_path, "app/gui/queue/page.py", "")
    write(tmp_path, "app/runs/anything.py", "")

    assert unplaced(tmp_path, "app.gui", ORDER["app.gui"]) == ["queue"]
    assert unplaced(tmp_path, "app.runs", ORDER["app.runs"]) == []


def test_a_circle_of_files_names_its_lines(tmp_path: Path) -> None:
    write(tmp_path, "app/gui/shell/a.py", "import os\nfrom app.gui.shell.b import B\n")
    write(tmp_path, "app/gui/shell/b.py", "from app.gui.shell import c\n")
    write(tmp_path, "app/gui/shell/c.py", "if TYPE_CHECKING:\n    from .a import A\n")
    write(tmp_path, "app/gui/shell/d.py", "from app.gui.shell.a import A\n")

    assert lines_of(circles(file_graph(tmp_path, "app"))) == [
        [
            "app/gui/shell/a.py:2 imports app.gui.shell.b.B",
            "app/gui/shell/b.py:1 imports app.gui.shell.c",
            "app/gui/shell/c.py:2 imports app.gui.shell.a.A",
        ]
    ]
    assert circles(folder_graph(tmp_path, "app.gui")) == []


def test_a_circle_of_folders_without_one_of_files_is_found(tmp_path: Path) -> None:
    write(tmp_path, "app/gui/tables/a.py", "from app.gui.session.b import B\n")
    write(tmp_path, "app/gui/session/b.py", "")
    write(tmp_path, "app/gui/session/c.py", "from app.gui.tables.a import A\n")

    assert circles(file_graph(tmp_path, "app")) == []
    assert [[i.path for i in circle] for circle in circles(folder_graph(tmp_path, "app.gui"))] == [
        ["app/gui/session/c.py", "app/gui/tables/a.py"]
    ]


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
    """Comments are free: the limit is on what a class does, not on what explains it."""
    long = []
    for file in source_files(ROOT, "app/gui"):
        lines = file.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ClassDef):
                body = lines[node.lineno - 1 : node.end_lineno]
                if sum(not line.strip().startswith("#") for line in body) > MAX_CLASS_LINES:
                    long.append(f"{file.relative_to(ROOT)}: {node.name}")
    assert long == []

"""`rackless --self-test`: try an installation, part by part, in a home of its own.

What a bundle lacks shows only when it is used: a module that is imported by its name, a file that a
package reads, a library of the system. So each part is really used, and the result is printed.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from app.cli.gui import has_display

WINDOW_TIMEOUT_S = 60.0
LATE_IMPORTS = (
    *("jinja2", "huggingface_hub", "keyring", "keyring.backends", "rich.console", "yaml"),
    *("cryptography.x509", "asyncssh", "pydantic", "numpy", "pynvml"),
)
"""Packages that the app imports only when something needs them."""


class Failed(Exception):
    """A part does not work; the message says why."""


def test_self() -> int:
    """Try every part, print one line for each, and return 0 if all work.

    No variable of the caller's names the home, so nothing of the user's is touched.
    """
    steps: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("version", _show_version),
        ("imports", _import_all),
        ("resources", _read_resources),
        ("agent", _build_agent),
        ("store", _open_store),
        ("window", _open_window),
        ("local node", _start_agent),
    )
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="rackless-self-test-") as folder:
        home = Path(folder)
        os.environ["RACKLESS_AGENT_HOME"] = str(home / "agent")
        for name, step in steps:
            began_s = time.monotonic()
            try:
                said, mark = step(home / "master"), "ok    "
            except Exception as error:  # noqa: BLE001 - an edge: each failure is a result
                said, mark = f"{type(error).__name__}: {error}", "FAILED"
                num_failed += 1
            print(f"{mark} {name}: {said} ({time.monotonic() - began_s:.1f} s)", flush=True)
    print("self-test passed" if not num_failed else f"self-test failed: {num_failed} parts")
    return min(num_failed, 1)


def _show_version(home: Path) -> str:
    kind = "bundle" if getattr(sys, "frozen", False) else "Python"
    return f"{importlib.metadata.version('rackless')}, {kind} {sys.version.split()[0]}"


def _import_all(home: Path) -> str:
    import app

    names = [found.name for found in pkgutil.walk_packages(app.__path__, "app.")]
    names = [name for name in names if not name.endswith("__main__")]
    if len(names) < 100:
        raise Failed(f"only {len(names)} modules of the app can be listed")
    for name in (*names, *LATE_IMPORTS):
        importlib.import_module(name)
    return f"{len(names)} modules of the app, {len(LATE_IMPORTS)} packages"


def _read_resources(home: Path) -> str:
    from app.library.recipes import list_recipes
    from app.provisioning.environment import read_train_lock
    from app.troubleshooting import read_sections

    recipes, sections = list_recipes(home / "recipes"), read_sections()
    lock = read_train_lock()
    return f"{len(recipes)} recipes, {len(sections)} help topics, lock {lock.sha256[:8]}"


def _build_agent(home: Path) -> str:
    from app.nodes.archive import build_archive

    archive = build_archive()
    return f"{len(archive.data):,} bytes, {archive.sha256[:12]}"


def _open_store(home: Path) -> str:
    from app.core.nodes import ListNodes
    from app.core.runs import ListRuns

    async def count() -> tuple[int, int]:
        from app.core.core import Core

        async with Core.open(home) as core:
            return len(await core.do(ListNodes())), len(await core.do(ListRuns()))

    nodes, runs = asyncio.run(count())
    return f"{nodes} nodes, {runs} runs"


def _open_window(home: Path) -> str:
    if not has_display():
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from app.gui.self_test import open_and_close

    return open_and_close(home, WINDOW_TIMEOUT_S)


def _start_agent(home: Path) -> str:
    from app.core.new_nodes import AddNode

    if shutil.which("python3") is None:
        return "left out: there is no python3 on this PC"

    async def add() -> str:
        from app.core.core import Core
        from app.nodes.node import LocalAddress

        async with Core.open(home) as core:
            node = await core.do(AddNode(name="here", address=LocalAddress()))
            facts = node.facts  # the agent ends with this connection
            return f"{facts.os}, Python {facts.python}" if facts is not None else "no facts"

    return asyncio.run(add())

"""List the files that builds of environments left on this node, and delete unneeded ones.

Environments and their wheels are gigabytes each, and each new lock adds more. An environment is
needed while training is set up to use it, while an attempt runs, and for a while after that,
because the nodes of a lost run start the next attempt with the same interpreter.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agents.contract.environments import KeptItem, KeptKind
from agents.disk_space import freed_bytes
from agents.errors import ExpectedError, explain_os_error
from agents.node.build_tools import PYTHONS, TOOLS
from agents.node.environment import COMPLETE, read_adopted, read_marker
from agents.shared.packages.wheel_store import HALVES, PARTIAL, STORE
from agents.state import Home, locked, take_lock
from agents.supervisor.attempt import AttemptFolder, find_attempts, is_over
from agents.supervisor.leases import is_any_held

RECOVERY_S = 2 * 3600.0
"""Time after the end of an attempt during which nodes may recover its run, in seconds."""


def list_kept(home: Home) -> tuple[KeptItem, ...]:
    """Return all results of builds on this node, largest first."""
    needs = _needs(home)
    found = [
        KeptItem(
            kind=kind,
            name=_name(kind, folder),
            size_bytes=freed_bytes(folder),
            used_s=folder.stat().st_mtime,
            needed_by=needs.get(_name(kind, folder), ""),
        )
        for kind, folder in _folders(home)
    ]
    return tuple(sorted(found, key=lambda item: -item.size_bytes))


def prune(home: Home, names: Sequence[str]) -> int:
    """Delete items by name; return the bytes freed.

    Raises:
        ExpectedError: an item is needed or in use by now.
    """
    folders = {_name(kind, folder): folder for kind, folder in _folders(home)}
    freed = 0
    for name in names:
        folder = folders.get(name)
        if folder is None:  # another master has deleted it
            continue
        # Read again for each item: deleting gigabytes takes long enough for a run to start.
        needs = _needs(home)
        if name in needs:
            raise ExpectedError(f"{name} is not deleted: {needs[name]} needs it by now.")
        freed += _delete(folder)
    return freed


def _folders(home: Home) -> Iterator[tuple[KeptKind, Path]]:
    for folder in _inside(home.environments):
        if not folder.name.startswith("."):
            yield "packages" if folder.name.startswith("packages-") else "environment", folder
    for folder in _inside(home.path / STORE):
        is_part = folder.name == HALVES or folder.name.startswith(PARTIAL)
        yield "downloads" if is_part else "wheels", folder
    for folder in _inside(home.path / TOOLS):
        if folder.name.startswith("uv-"):
            yield "uv", folder
    for folder in _inside(home.path / PYTHONS):
        if not folder.name.startswith("."):
            yield "python", folder


def _inside(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from (f for f in sorted(place.iterdir()) if f.is_dir() and not f.is_symlink())


def _name(kind: KeptKind, folder: Path) -> str:
    return f"{kind}-{folder.name.lstrip('.').removeprefix(f'{kind}-')}"


def _needs(home: Home) -> dict[str, str]:
    """Return the user of each needed item, by item name."""
    needs: dict[str, str] = {}
    used = [(python, f"run {attempt.run_id}") for attempt, python in _recent_attempts(home)]
    adopted = read_adopted(home)
    if adopted is not None and adopted.python:
        used.append((adopted.python, "training"))
    for python, user in used:
        environment = Path(python).parent.parent
        if environment.parent != home.environments:
            continue  # the user's own interpreter
        needs[_name("environment", environment)] = user
        wheels = home.path / STORE / read_marker(environment).wheels
        # Nodes that are set up later copy wheels from this node instead of downloading them.
        needs[_name("wheels", wheels)] = "other nodes, which get them from here"
        # The environment's python is a link to the interpreter on which it was built.
        base = (environment / "bin" / "python").resolve()
        if (home.path / PYTHONS) in base.parents:
            brought = base.relative_to(home.path / PYTHONS).parts[0]
            needs[_name("python", home.path / PYTHONS / brought)] = user
    if any(is_locked(lock) for lock in (home.path / STORE).glob(f"{PARTIAL}*.lock")):
        needs[_name("downloads", home.path / STORE / HALVES)] = "a set-up that is downloading"
    if is_any_held(home):
        for kind, folder in _folders(home):
            if kind == "packages":
                needs[_name(kind, folder)] = "work that is running"
    return needs


def is_locked(file: Path) -> bool:
    """Return whether a process holds the lock of an existing file."""
    lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        return not take_lock(lock, 0.0)
    finally:
        os.close(lock)


def _recent_attempts(home: Home) -> Iterator[tuple[AttemptFolder, str]]:
    for attempt in find_attempts(home):
        intent = attempt.read_intent()
        if intent is not None and not (is_over(attempt) and _age_s(attempt.folder) > RECOVERY_S):
            yield attempt, intent.python


def _age_s(folder: Path) -> float:
    # By the newest file, because the folder's own mtime does not change with its files.
    written = [file.stat().st_mtime for file in folder.iterdir()]
    return time.time() - max(written, default=0.0)


def _delete(folder: Path) -> int:
    """Delete a folder; return the bytes freed."""
    size = freed_bytes(folder)
    busy = f"{folder} is not deleted: it is being written."
    lock = folder.with_name(f"{folder.name}.lock")
    with locked(lock, 1.0, busy):
        try:
            # First, so that an interrupted deletion leaves no environment that looks complete.
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            raise explain_os_error(error, f"deleting {folder}") from error
        lock.unlink(missing_ok=True)
    return size

"""List, verify and delete the checkpoints of this node: folders named `step-NNNNNNNN`.

The trainer writes under another name and renames the folder at the end, so a folder with this name
was complete once; `verify` checks whether it still is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract import run_layout
from agents.contract.names import MAX_ATTEMPT, MAX_TIME_S, is_safe_name
from agents.contract.run import CheckpointInfo, FileEntry
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.node.files import describe_file, split_path
from agents.node.manifest import read_manifest
from agents.state import Home, fsync_folder

ASIDE_PREFIX = ".aside-"
"""Prefix of intact checkpoints that another node's copy has replaced."""


def list_checkpoints(home: Home, run_id: str | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints of one run or of all runs, sorted by run and step."""
    if run_id is not None:
        folders = home.checkpoints(run_id).glob("*")
    else:
        # Names that begin with a dot are runs that are being deleted.
        folders = home.runs.glob(f"[!.]*/{run_layout.CHECKPOINTS}/*")
    # Rackless creates no folders with unsafe names.
    named = (folder for folder in folders if is_safe_name(folder.parents[1].name))
    steps = ((folder, run_layout.step_of_checkpoint(folder.name)) for folder in named)
    found = [describe_folder(home, f, step) for f, step in steps if step is not None and f.is_dir()]
    return sorted(found, key=lambda info: (info.run_id, info.step))


def describe_folder(home: Home, folder: Path, step: int) -> CheckpointInfo:
    """Describe one checkpoint from its manifest; set `problem` if the manifest is unusable."""
    manifest: dict[str, Any] = {}
    entries: list[FileEntry] = []
    problem = ""
    try:
        manifest = read_manifest(folder)
        entries = read_entries(manifest)
    except WireError as error:
        problem = f"{run_layout.MANIFEST_FILE} cannot be used: {error}"
    attempt = _number(manifest.get("attempt"), MAX_ATTEMPT, 0)
    if not problem and attempt < 1:
        problem = f"{run_layout.MANIFEST_FILE} cannot be used: it names no attempt"
    return CheckpointInfo(
        run_id=folder.parent.parent.name,
        step=step,
        attempt=int(attempt),
        path=folder.relative_to(home.path).as_posix(),
        size_bytes=sum(entry.size_bytes for entry in entries) or _weigh(folder),
        manifest_sha256="" if problem else hash_entries(entries),
        created_s=_number(manifest.get("created_s"), MAX_TIME_S, _changed_s(folder)),
        # None means not checked: only `verify` reads the files themselves.
        verified=False if problem else None,
        problem=problem,
        signer=str(manifest.get("node", "")),
        signature=str(manifest.get("signature", "")),
    )


def _weigh(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes, if it has no usable manifest."""
    with contextlib.suppress(OSError):  # it may be deleted meanwhile
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return 0


def _changed_s(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def read_entries(manifest: dict[str, Any]) -> list[FileEntry]:
    """Return the files of a manifest.

    Raises:
        WireError: it lists no files, or an entry is malformed.
    """
    values = manifest.get("files")
    if not isinstance(values, list) or not values:
        raise WireError("it lists no files")
    return [from_wire(FileEntry, value, "files") for value in values]


def hash_entries(entries: list[FileEntry]) -> str:
    """Return one hash for a list of files, independent of their order."""
    # Ranks write files in any order, but all nodes must get the same hash.
    rows = to_wire(sorted(entries, key=lambda entry: entry.path))
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode("ascii")).hexdigest()


def verify(home: Home, run_id: str, step: int) -> CheckpointInfo:
    """Verify the hashes of all files of a checkpoint.

    Raises:
        ExpectedError: this node has no such checkpoint.
    """
    folder = _require(home, run_id, step)
    info = describe_folder(home, folder, step)
    if info.problem:
        return info
    try:
        problem = _find_damage(folder, read_entries(read_manifest(folder)))
    except WireError as error:  # deleted or changed meanwhile
        problem = f"{run_layout.MANIFEST_FILE} cannot be used: {error}"
    return replace(info, verified=not problem, problem=problem)


def set_aside(home: Home, run_id: str, step: int) -> None:
    """Hide a checkpoint that another one replaces; the trainer deletes it after the next save.

    Raises:
        ExpectedError: this node has no such checkpoint, or it cannot be renamed.
    """
    folder = _require(home, run_id, step)
    try:
        os.rename(folder, folder.with_name(f"{ASIDE_PREFIX}{folder.name}-{time.time_ns()}"))
        fsync_folder(folder.parent)
    except OSError as error:
        raise explain_os_error(error, f"renaming {folder}") from error


def delete(home: Home, run_id: str, step: int) -> None:
    """Delete a checkpoint.

    Raises:
        ExpectedError: this node has no such checkpoint, or it cannot be deleted.
    """
    folder = _require(home, run_id, step)
    # Renamed first, so that an interrupted deletion leaves no folder that looks like a checkpoint.
    doomed = folder.with_name(f".deleted-{folder.name}-{os.getpid()}")
    try:
        os.rename(folder, doomed)
        fsync_folder(folder.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise explain_os_error(error, f"deleting {folder}") from error


def _require(home: Home, run_id: str, step: int) -> Path:
    folder = home.checkpoints(run_id) / run_layout.checkpoint_name(step)
    # A link could lead to another run's checkpoint, which would be deleted instead.
    if not folder.is_dir() or folder.is_symlink():
        raise ExpectedError(f"This node has no checkpoint of run {run_id} at step {step}.")
    return folder


def _find_damage(folder: Path, entries: list[FileEntry]) -> str:
    """Return the first problem with the files, or an empty string."""
    for entry in entries:
        try:
            # A manifest may come from another PC; its paths must not lead out of the folder.
            split_path(entry.path, "The file name")
            found = describe_file(folder, folder / entry.path)
        except ExpectedError as error:
            return error.message
        if found.size_bytes != entry.size_bytes:
            return f"{entry.path} has {found.size_bytes} bytes instead of {entry.size_bytes}"
        if found.sha256 != entry.sha256:
            return f"{entry.path} is damaged: its sha256 is not the recorded one"
    return ""


def _number(value: Any, most: float, missing: float) -> float:
    # In Python, bool is a subclass of int.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= most else missing

"""Handle requests about checkpoints, fences, bundles and artifacts of a node."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.run import BundleStatus, CheckpointInfo, Claim, FileEntry
from agents.contract.wire import from_wire
from agents.errors import ExpectedError, explain_os_error
from agents.node import checkpoints
from agents.node.file_store import FileStore
from agents.node.files import describe_file, list_files, read_bundle_status, split_destination
from agents.serve.channel import Call
from agents.state import Home
from agents.supervisor.attempt import find_attempts, is_over, read_status
from agents.supervisor.election_process import end_election
from agents.supervisor.fence import claim_attempt, raise_fence
from agents.supervisor.sweep import describe_unkillable, sweep


@dataclass(frozen=True)
class ListCheckpointsArgs:
    run_id: str | None = None


@dataclass(frozen=True)
class CheckpointArgs:
    run_id: str
    step: int


@dataclass(frozen=True)
class FenceArgs:
    run_id: str
    attempt: int


@dataclass(frozen=True)
class ClaimArgs:
    run_id: str
    attempt: int
    replaces: int


@dataclass(frozen=True)
class RunArgs:
    run_id: str


@dataclass(frozen=True)
class PathArgs:
    path: str


@dataclass(frozen=True)
class BundleArgs:
    destination: str
    files: tuple[FileEntry, ...]


def list_checkpoints(call: Call) -> dict[str, Any]:
    """Return the checkpoints of one run or of all."""
    args = from_wire(ListCheckpointsArgs, call.args, "args")
    return {"checkpoints": checkpoints.list_checkpoints(call.home, args.run_id)}


def verify_checkpoint(call: Call) -> CheckpointInfo:
    """Hash the files of a checkpoint and compare."""
    args = from_wire(CheckpointArgs, call.args, "args")
    return checkpoints.verify(call.home, args.run_id, args.step)


def delete_checkpoint(call: Call) -> dict[str, Any]:
    """Delete a checkpoint of this node."""
    args = from_wire(CheckpointArgs, call.args, "args")
    checkpoints.delete(call.home, args.run_id, args.step)
    return {}


def fence(call: Call) -> dict[str, Any]:
    """Refuse older attempts from now on; return the newest known one."""
    args = from_wire(FenceArgs, call.args, "args")
    return {"attempt": raise_fence(call.home, args.run_id, args.attempt)}


def claim(call: Call) -> Claim:
    """Grant an attempt number to one claimer, unless it does not know the newest attempt here."""
    args = from_wire(ClaimArgs, call.args, "args")
    return claim_attempt(call.home, args.run_id, args.attempt, args.replaces)


def delete(call: Call) -> dict[str, Any]:
    """Delete all files of a finished run on this node, and end what is left of its processes."""
    args = from_wire(RunArgs, call.args, "args")
    folder = call.home.run(args.run_id)
    for attempt in find_attempts(call.home):
        if attempt.run_id != args.run_id:
            continue
        if not is_over(attempt):
            raise ExpectedError(
                f"Run {args.run_id} is still running on this node.",
                f"Stop it first: rackless runs stop {args.run_id}",
            )
        end_election(attempt)
        # They would still write into the folder.
        if left := sweep(attempt.tag, 0.0):
            node = read_status(attempt).node
            raise ExpectedError(describe_unkillable(left, node), "Restart that PC")
    if not folder.exists():
        return {"freed_bytes": 0}
    _refuse_links(call.home, folder)
    return {"freed_bytes": _remove(folder)}


def _remove(folder: Path) -> int:
    """Delete a folder, which disappears at once by a rename; return the bytes freed."""
    doomed = folder.with_name(f".deleted-{folder.name}-{os.getpid()}")
    try:
        os.rename(folder, doomed)
        # After the rename, when nobody adds files any more.
        freed = _measure(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise explain_os_error(error, f"deleting {folder}") from error
    return freed


def _measure(folder: Path) -> int:
    files = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    # lstat: the target of a symlink is not deleted.
    return sum(path.lstat().st_size for path in files)


def bundle_status(call: Call) -> BundleStatus:
    """Return which files of a bundle are missing on this node."""
    args = from_wire(BundleArgs, call.args, "args")
    return read_bundle_status(call.home, args.destination, args.files)


def hash_artifact(call: Call) -> dict[str, Any]:
    """Hash the files of an artifact's copy; none where it is gone."""
    folder = _find_artifact(call)
    found = []
    for path in list_files(call.home, folder) if folder.is_dir() else []:
        found.append(describe_file(folder, path))
        # Else a damaged file would be placed in the next copy of the artifact too.
        FileStore(call.home.path).drop_altered(path, found[-1].sha256)
    return {"files": found}


def delete_artifact(call: Call) -> dict[str, Any]:
    """Delete an artifact's copy or an export; one that is already gone frees 0 bytes."""
    folder = _find_artifact(call, or_export=True)
    if not folder.is_dir():
        return {"freed_bytes": 0}
    FileStore(call.home.path).release(folder)
    return {"freed_bytes": _remove(folder)}


def _find_artifact(call: Call, *, or_export: bool = False) -> Path:
    parts = split_destination(from_wire(PathArgs, call.args, "args").path)
    folder = call.home.path.joinpath(*parts)
    is_artifact = parts[0] == "artifacts" and len(parts) == 2
    # runs/RUN/exports/NAME: nothing else below runs may be deleted this way.
    is_export = or_export and len(parts) == 4 and (parts[0], parts[2]) == ("runs", "exports")
    if not (is_artifact or is_export) or folder.is_symlink():
        raise ExpectedError(
            f"{'/'.join(parts)} is not an artifact.", "Artifacts are below artifacts/"
        )
    _refuse_links(call.home, folder)
    return folder


def _refuse_links(home: Home, folder: Path) -> None:
    """Refuse a folder of ours that a symbolic link leads to: what it deletes lies elsewhere."""
    for step in (folder, *folder.parents):
        if step == home.path:
            return
        if step.is_symlink():
            raise ExpectedError(
                f"{step} is a symbolic link, which is not followed.", "Remove the link on this node"
            )

"""Handlers of requests about checkpoints, fences, bundles and artifacts of a node."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agents.contract.requests.runs import (
    Checkpoints,
    ClaimAttempt,
    CompareBundle,
    DeleteArtifact,
    DeleteCheckpoint,
    DeleteRun,
    Fence,
    Halted,
    HaltRun,
    HashArtifact,
    HashedFiles,
    ListCheckpoints,
    RaiseFence,
    VerifyCheckpoint,
)
from agents.contract.requests.storage import Freed
from agents.contract.run import BundleStatus, CheckpointInfo, Claim
from agents.errors import ExpectedError, explain_os_error
from agents.node import checkpoints
from agents.node.file_store import FileStore
from agents.node.files import describe_file, list_files, read_bundle_status, split_destination
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.state import Home, require_name
from agents.supervisor.attempt import find_attempts, is_over, read_status
from agents.supervisor.election_process import end_election
from agents.supervisor.fence import claim_attempt, raise_fence, read_halt
from agents.supervisor.halt import halt_run
from agents.supervisor.ownership import end_strays
from agents.supervisor.sweep import describe_unkillable, find_processes, read_tagged, sweep


@handles(ListCheckpoints)
def list_checkpoints(call: Call, request: ListCheckpoints) -> Checkpoints:
    """Return the checkpoints of one run or of all."""
    found = checkpoints.list_checkpoints(call.home, request.run_id)
    return Checkpoints(checkpoints=tuple(found))


@handles(VerifyCheckpoint)
def verify_checkpoint(call: Call, request: VerifyCheckpoint) -> CheckpointInfo:
    """Compare the files of a checkpoint with their hashes."""
    return checkpoints.verify(call.home, request.run_id, request.step)


@handles(DeleteCheckpoint)
def delete_checkpoint(call: Call, request: DeleteCheckpoint) -> None:
    """Delete a checkpoint of this node."""
    checkpoints.delete(call.home, request.run_id, request.step)


@handles(RaiseFence)
def fence(call: Call, request: RaiseFence) -> Fence:
    """Refuse older attempts from now on; return the newest known one."""
    newest = raise_fence(call.home, request.run_id, request.attempt)
    return Fence(attempt=newest, halted=read_halt(call.home, request.run_id))


@handles(HaltRun)
def halt(call: Call, request: HaltRun) -> Halted:
    """Start no known attempt of the run any more; return those that still have processes."""
    newest = halt_run(call.home, require_name(request.run_id, "The run id"), request.attempt)
    tagged = list(read_tagged())
    # Of an attempt whose folder was deleted, no stop could end the processes.
    end_strays(call.home, tagged)
    attempts = [one for one in find_attempts(call.home) if one.run_id == request.run_id]
    active = (one.number for one in attempts if not is_over(one) or find_processes(one.tag))
    return Halted(attempt=newest, active=tuple(active))


@handles(ClaimAttempt)
def claim(call: Call, request: ClaimAttempt) -> Claim:
    """Grant an attempt number once, unless the claimer does not know this node's newest attempt."""
    return claim_attempt(call.home, request.run_id, request.attempt, request.replaces)


@handles(DeleteRun)
def delete(call: Call, request: DeleteRun) -> Freed:
    """Delete all files of a finished run on this node, and end its remaining processes."""
    folder = call.home.run(request.run_id)
    for attempt in find_attempts(call.home):
        if attempt.run_id != request.run_id:
            continue
        if not is_over(attempt):
            raise ExpectedError(
                f"Run {request.run_id} is still running on this node.",
                f"Stop it first: rackless runs stop {request.run_id}",
            )
        end_election(attempt)
        # Remaining processes would write into the folder while it is deleted.
        if left := sweep(attempt.tag, 0.0):
            node = read_status(attempt).node
            raise ExpectedError(describe_unkillable(left, node), "Restart that PC")
    if not folder.exists():
        return Freed(freed_bytes=0)
    # Deleting through a link would delete files of another place.
    _refuse_links(call.home, folder)
    return Freed(freed_bytes=_remove(folder))


def _remove(folder: Path) -> int:
    """Delete a folder, hiding it by a rename first; return the freed bytes."""
    doomed = folder.with_name(f".deleted-{folder.name}-{os.getpid()}")
    try:
        os.rename(folder, doomed)
        # After the rename, since no program adds files then.
        freed = _measure(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise explain_os_error(error, f"deleting {folder}") from error
    return freed


def _measure(folder: Path) -> int:
    files = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    # lstat: the target of a symlink is not deleted.
    return sum(path.lstat().st_size for path in files)


@handles(CompareBundle)
def bundle_status(call: Call, request: CompareBundle) -> BundleStatus:
    """Return which files of a bundle are missing on this node."""
    return read_bundle_status(call.home, request.destination, request.files)


@handles(HashArtifact)
def hash_artifact(call: Call, request: HashArtifact) -> HashedFiles:
    """Hash the files of an artifact's copy; the list is empty if it is missing."""
    folder = _find_artifact(call.home, request.path)
    found = []
    for path in list_files(call.home, folder) if folder.is_dir() else []:
        found.append(describe_file(folder, path))
        # Else the next copy of the artifact would get a damaged file of the store, too.
        FileStore(call.home.path).drop_altered(path, found[-1].sha256)
    return HashedFiles(files=tuple(found))


@handles(DeleteArtifact)
def delete_artifact(call: Call, request: DeleteArtifact) -> Freed:
    """Delete an artifact's copy or an export; a missing one frees 0 bytes."""
    folder = _find_artifact(call.home, request.path, or_export=True)
    if not folder.is_dir():
        return Freed(freed_bytes=0)
    FileStore(call.home.path).release(folder)
    return Freed(freed_bytes=_remove(folder))


def _find_artifact(home: Home, path: str, *, or_export: bool = False) -> Path:
    parts = split_destination(path)
    folder = home.path.joinpath(*parts)
    is_artifact = parts[0] == "artifacts" and len(parts) == 2
    # runs/RUN/exports/NAME: nothing else below runs may be deleted this way.
    is_export = or_export and len(parts) == 4 and (parts[0], parts[2]) == ("runs", "exports")
    if not (is_artifact or is_export) or folder.is_symlink():
        raise ExpectedError(
            f"{'/'.join(parts)} is not an artifact.", "Artifacts are below artifacts/"
        )
    _refuse_links(home, folder)
    return folder


def _refuse_links(home: Home, folder: Path) -> None:
    """Refuse a folder below the agent's home that a symbolic link leads out of it."""
    for step in (folder, *folder.parents):
        if step == home.path:
            return
        if step.is_symlink():
            raise ExpectedError(
                f"{step} is a symbolic link, which is not followed.", "Remove the link on this node"
            )

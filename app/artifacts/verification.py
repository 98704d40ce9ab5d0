"""Compare every copy of an artifact with the hashes in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.requests.runs import HashArtifact
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import require_own
from app.artifact import ArtifactCopy, ArtifactSnapshot, CopyState
from app.errors import UserError
from app.hub import hub
from app.progress import OnMessage
from app.runs.services import Services
from app.storage.hashes import hash_file
from app.text import show_list


async def check_artifact(
    services: Services, artifact: ArtifactSnapshot, tell: OnMessage
) -> tuple[ArtifactCopy, ...]:
    """Read every copy in full, compare it with the hashes, and store the state of each."""
    found = []
    for copy in artifact.copies:
        tell(f"reading {artifact.label} in {copy.place}")
        checked = await _check(services, artifact, copy)
        services.artifacts.save_copy(artifact, checked)
        found.append(checked)
    return tuple(found)


async def _check(
    services: Services, artifact: ArtifactSnapshot, copy: ArtifactCopy
) -> ArtifactCopy:
    try:
        if copy.kind == "folder":
            actual = await asyncio.to_thread(hash_folder, Path(copy.place), artifact.files)
        elif copy.kind == "node":
            actual = (await services.pool.agent(copy.place).ask(HashArtifact(path=copy.path))).files
        else:
            actual = await asyncio.to_thread(hub.read_files, copy.place, artifact.files)
    except UserError as error:
        return replace(copy, state="unknown", problem=error.message)
    # The verification report is never pushed to the hub.
    expected = hub.pushed(artifact.files) if copy.kind == "hub" else artifact.files
    state, problem = compare_files(expected, actual)
    return replace(copy, state=state, problem=problem, checked_s=time.time())


def hash_folder(folder: Path, files: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Return the `files` that exist in a folder, with their actual sizes and hashes."""
    found = []
    for entry in files:
        path = folder / entry.path
        try:
            require_own(path, folder)
            size = path.stat().st_size
            # Read even if size and time are unchanged: a check has to find silent damage.
            sha256 = hash_file(path) if size == entry.size_bytes else ""
        except OSError:
            continue
        found.append(FileEntry(path=entry.path, size_bytes=size, sha256=sha256))
    return tuple(found)


def compare_files(
    expected: Sequence[FileEntry], actual: Sequence[FileEntry]
) -> tuple[CopyState, str]:
    """Return the state of a copy that has the files `actual`, and its problem, if any.

    >>> one = FileEntry(path="a", size_bytes=1, sha256="x")
    >>> compare_files((one,), ()), compare_files((one,), (one,))
    (('missing', 'it was moved or deleted'), ('whole', ''))
    """
    known = {entry.path: entry.sha256 for entry in actual}
    gone = [entry.path for entry in expected if entry.path not in known]
    if gone and len(gone) == len(expected):
        return "missing", "it was moved or deleted"
    other = [e.path for e in expected if e.path in known and known[e.path] != e.sha256]
    faults = [f"{show_list(gone[:3])} missing"] if gone else []
    faults += [f"{show_list(other[:3])} changed since the export"] if other else []
    return ("damaged", ", ".join(faults)) if faults else ("whole", "")

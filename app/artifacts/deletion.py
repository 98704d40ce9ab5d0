"""Delete copies of artifacts, with a warning before the last one.

Only the files in the registry and the Modelfiles written by Rackless are deleted; other files in a
folder are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agents.contract.requests.runs import DeleteArtifact
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import is_own
from app.artifact import ArtifactCopy, ArtifactSnapshot, tell_last
from app.artifacts.record import MODELFILES, missing_files
from app.errors import UserError
from app.paths import is_same_folder, whole_path
from app.runs.services import Services
from app.text import show_list


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedArtifact:
    """Result of a deletion."""

    label: str
    freed_bytes: int
    deleted: tuple[str, ...]
    """Locations whose files are deleted."""
    left: tuple[str, ...] = ()
    """Sentences about kept files with the reasons."""
    is_forgotten: bool
    """True if the artifact itself was removed from the list."""


def find_place(artifact: ArtifactSnapshot, place: str | None) -> str | None:
    """Resolve a location that the user typed to the stored one.

    Raises:
        UserError: there is no copy.
    """
    known = [copy.place for copy in artifact.copies]
    if place is None or place in known:
        return place
    folders = [copy.place for copy in artifact.copies if copy.kind == "folder"]
    with suppress(OSError):  # the path does not exist
        path = whole_path(Path(place))
        for folder in folders:
            if folder == str(path) or is_same_folder(Path(folder), path):
                return folder
    raise UserError(f"no copy of {artifact.label} is in {place}", f"It has {show_list(known)}.")


async def delete_artifact(
    services: Services, artifact: ArtifactSnapshot, place: str | None, even_last: bool
) -> DeletedArtifact:
    """Delete the copy at `place`; None: all copies, and the artifact from the list.

    Raises:
        UserError: no copy would be left and `even_last` is False; there is no such copy; or its
            node cannot be reached.
    """
    place = await asyncio.to_thread(find_place, artifact, place)
    chosen = [copy for copy in artifact.copies if place in (None, copy.place)]
    warning = tell_last(artifact, place)
    if warning and not even_last and artifact.copies:
        raise UserError(warning, "To delete it anyway, add --yes.")
    deleted, left, freed = [], [], 0
    for copy in chosen:
        freed_here, why = await _delete_copy(services, artifact, copy)
        freed += freed_here
        left.extend([why] if why else [])
        deleted.extend([] if why else [copy.place])
        # Even if its files are kept, the copy leaves the list, as the user asked.
        services.artifacts.forget_copy(artifact, copy)
    if place is None:
        services.artifacts.forget(artifact)
    return DeletedArtifact(
        label=artifact.label,
        freed_bytes=freed,
        deleted=tuple(deleted),
        left=tuple(left),
        is_forgotten=place is None,
    )


async def _delete_copy(
    services: Services, artifact: ArtifactSnapshot, copy: ArtifactCopy
) -> tuple[int, str]:
    if copy.kind == "hub":
        return 0, f"{copy.place} stays on the hub; delete it there: {copy.path}"
    if copy.kind == "node":
        if copy.place not in services.pool.names():
            return 0, f"{copy.place} is no longer a node; its files stay there"
        agent = services.pool.agent(copy.place)
        return (await agent.ask(DeleteArtifact(path=copy.path))).freed_bytes, ""
    return await asyncio.to_thread(_delete_folder, Path(copy.place), artifact.files)


def _delete_folder(folder: Path, files: Sequence[FileEntry]) -> tuple[int, str]:
    # A subfolder may have been replaced by a link to other files of the user.
    here = [entry for entry in files if is_own(folder / entry.path, folder)]
    if len(missing_files(folder, here)) == len(here) and here:
        return 0, f"{folder} now holds something else, so it is kept"
    freed = 0
    try:
        for entry in here:
            (folder / entry.path).unlink()
            freed += entry.size_bytes
        for modelfile in folder.glob(MODELFILES) if here else ():
            modelfile.unlink()
        # In reverse order, so that a folder is visited after its subfolders.
        for below in sorted(
            (p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True
        ):
            if not any(below.iterdir()):
                below.rmdir()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be deleted: {error.strerror}", "Repair its permissions."
        ) from error
    if folder.is_dir():
        return freed, f"{folder} holds other files too, which are kept"
    return freed, ""

"""Share models of the Hugging Face cache between nodes.

A snapshot in the cache of one node is exported as a folder of hard links below `models`, which is
copied to other nodes like any folder. There it stays: a run uses the copy by its path, because the
cache belongs to the user, whose other programs trust it as the hub's own files. `hub/HASH.json`
below the agent's home records the copy of each model.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from agents.contract.chunks import DIGEST_CHARACTERS
from agents.contract.hub import digest_of, read_snapshot
from agents.contract.hub import find_snapshot as find_cached
from agents.contract.requests.hub import (
    MAX_CACHED,
    CachedRepo,
    CacheListing,
    FoundSnapshot,
    SnapshotPlace,
)
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import FileStore
from agents.node.files import list_files, split_destination
from agents.shared.files.full_disk import removing_half
from agents.shared.files.hub_cache import has_content, list_cache
from agents.state import Home, read_json, write_json


def find_snapshot(home: Home, model: str) -> FoundSnapshot:
    """Return the snapshot in the hub's cache, else the agent's own copy."""
    cached = read_snapshot(model, os.environ)
    found = find_copy(home, model) if cached is None else None
    return found if found is not None else FoundSnapshot(snapshot=cached)


def find_copy(home: Home, model: str) -> FoundSnapshot | None:
    """Return the agent's own copy of a model if all its files are there, else None."""
    try:
        place = from_wire(SnapshotPlace, read_json(_record(home, model)), "record")
        folder = home.path.joinpath(*split_destination(place.folder))
        is_whole = place.model == model and all(
            _has(folder / file.path, file.size_bytes) for file in place.snapshot.files
        )
    except (OSError, ValueError, WireError, ExpectedError):
        return None
    return FoundSnapshot(snapshot=place.snapshot, folder=str(folder)) if is_whole else None


def list_cached(home: Home) -> CacheListing:
    """Return what is in the hub's cache, and the agent's own copies of other models."""
    repos = {(one.kind, one.name): one for one in list_cache(os.environ)}
    for record in sorted((home.path / "hub").glob("*.json")):
        try:
            model = from_wire(SnapshotPlace, read_json(record), "record").model
        except (OSError, ValueError, WireError):
            continue  # unusable, so the model is downloaded or copied again
        copy = find_copy(home, model)
        if copy is not None and copy.snapshot is not None and ("model", model) not in repos:
            repos["model", model] = CachedRepo(
                kind="model",
                name=model,
                size_bytes=sum(file.size_bytes for file in copy.snapshot.files),
                revisions=(copy.snapshot.revision,),
            )
    return CacheListing(repos=tuple(repos.values())[:MAX_CACHED])


def offer_snapshot(home: Home, place: SnapshotPlace) -> None:
    """Export a snapshot as the folder of `place`.

    Raises:
        ExpectedError: the snapshot is gone, or the disk refuses.
    """
    found = find_snapshot(home, place.model)
    source = Path(found.folder) if found.folder else find_cached(place.model, os.environ)
    target = home.path.joinpath(*split_destination(place.folder))
    if found.snapshot is None or source is None or not found.snapshot.vouches_for(place.snapshot):
        raise ExpectedError(f"The copy of {place.model} on this node has changed.", "Try again")
    try:
        for file in place.snapshot.files:
            _give_name((source / file.path).resolve(strict=True), target / file.path)
    except OSError as error:
        raise explain_os_error(error, f"offering {place.model} to other nodes") from error


def keep_copy(home: Home, place: SnapshotPlace) -> FoundSnapshot:
    """Verify a copied folder and record it as this node's copy of its model.

    Raises:
        ExpectedError: a file is missing, wrong or not one of the snapshot, or the disk refuses.
    """
    folder = home.path.joinpath(*split_destination(place.folder))
    wanted = {folder / file.path for file in place.snapshot.files}
    try:
        other = next((path for path in list_files(home, folder) if path not in wanted), None)
        if other is not None:
            raise ExpectedError(
                f"{other} is not a file of {place.model}.", f"Delete {folder} on this node"
            )
        for file in place.snapshot.files:
            _require_blob(home, folder / file.path, file.blob)
        _record(home, place.model).parent.mkdir(mode=0o700, exist_ok=True)
        write_json(_record(home, place.model), to_wire(place))
    except OSError as error:
        raise explain_os_error(error, f"keeping {place.model} in {folder}") from error
    return FoundSnapshot(snapshot=place.snapshot, folder=str(folder))


def _record(home: Home, model: str) -> Path:
    return home.path / "hub" / f"{digest_of(model)}.json"


def _has(path: Path, size_bytes: int) -> bool:
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes


def _require_blob(home: Home, path: Path, blob: str) -> None:
    """Check that a file has the content that the hub calls `blob`.

    Raises:
        ExpectedError: it has other content.
        OSError: it cannot be read.
    """
    # A stored file was verified when it arrived.
    stored = None
    if len(blob) == DIGEST_CHARACTERS:
        stored = FileStore(home.path).find(blob, path.stat().st_size)
    if not (stored is not None and stored.samefile(path)) and not has_content(path, blob):
        raise ExpectedError(
            f"{path} differs from the file on the hub.",
            "Download the model again on the node that sent it",
        )


def _give_name(source: Path, target: Path) -> None:
    """Make `target` a hard link to a file, else a copy, unless it exists."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        with removing_half(target.with_name(f".{target.name}.{os.getpid()}")) as half:
            shutil.copyfile(source, half)
            os.replace(half, target)

"""Share models of the Hugging Face cache between nodes.

A snapshot in the cache of one node is exported as a folder of hard links below `models`, which is
copied to other nodes like any folder, and imported into their caches, again by hard links. So the
hub's tools find the files that they would have downloaded, and no file is stored twice.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path

from agents.contract.chunks import DIGEST_CHARACTERS
from agents.contract.hub import HubSnapshot, find_snapshot, hub_cache
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import FileStore
from agents.node.files import split_destination
from agents.shared.files.full_disk import removing_half
from agents.state import Home


def offer_snapshot(home: Home, model: str, snapshot: HubSnapshot, destination: str) -> None:
    """Export a cached snapshot as the folder `destination` below the agent's home.

    Raises:
        ExpectedError: the snapshot is gone, or the disk refuses.
    """
    folder = find_snapshot(model, os.environ)
    target = home.path.joinpath(*split_destination(destination))
    if folder is None or folder.name != snapshot.revision:
        raise ExpectedError(
            f"The snapshot of {model} in this node's cache has changed.", "Try again"
        )
    try:
        for file in snapshot.files:
            _give_name((folder / file.path).resolve(strict=True), target / file.path)
    except OSError as error:
        raise explain_os_error(error, f"offering {model} to other nodes") from error


def show_snapshot(home: Home, model: str, snapshot: HubSnapshot, source: str) -> None:
    """Import the folder `source` below the agent's home into the hub's cache as a snapshot.

    Raises:
        ExpectedError: a file is missing or wrong, or the disk refuses.
    """
    folder = home.path.joinpath(*split_destination(source))
    repository = hub_cache(os.environ) / f"models--{model.replace('/', '--')}"
    place = repository / "snapshots" / snapshot.revision
    try:
        for file in snapshot.files:
            _require_blob(home, folder / file.path, file.blob)
            _give_name(folder / file.path, repository / "blobs" / file.blob)
            link = place / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            # A relative link, like those of the hub's tools: the cache may be moved.
            with contextlib.suppress(FileExistsError):
                link.symlink_to(os.path.relpath(repository / "blobs" / file.blob, link.parent))
        # Last, because the ref makes the revision visible to the hub's tools.
        (repository / "refs").mkdir(exist_ok=True)
        with removing_half(repository / "refs" / f".main.{os.getpid()}") as half:
            half.write_text(snapshot.revision, encoding="ascii")
            os.replace(half, repository / "refs" / "main")
    except OSError as error:
        raise explain_os_error(error, f"showing {model} in {repository}") from error


def _require_blob(home: Home, path: Path, blob: str) -> None:
    """Check that a file has the content that the hub calls `blob`.

    Raises:
        ExpectedError: it has other content.
        OSError: it cannot be read.
    """
    size_bytes = path.stat().st_size
    # Blobs of large files (LFS) are named by SHA-256, other files by git's SHA-1.
    if len(blob) == DIGEST_CHARACTERS:
        # A stored file was verified when it arrived.
        stored = FileStore(home.path).find(blob, size_bytes)
        if stored is not None and stored.samefile(path):
            return
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)  # as git does
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != blob:
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

"""List and verify the Hugging Face cache of this PC, without asking the hub.

https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from agents.contract.chunks import DIGEST_CHARACTERS
from agents.contract.hub import check_hub_id, check_revision, hub_cache, is_broken_off
from agents.contract.hub import read_snapshot as read_model
from agents.contract.requests.hub import MAX_CACHED, MAX_REVISIONS, CachedKind, CachedRepo

_BLOCK_BYTES = 1 << 20
_KINDS: dict[str, CachedKind] = {"models--": "model", "datasets--": "data"}


def list_cache(environ: Mapping[str, str]) -> tuple[CachedRepo, ...]:
    """Return the models and data sets in the cache, by name; those without a file are left out."""
    try:
        folders = sorted(hub_cache(environ).iterdir())
    except OSError:
        return ()
    found = (_read_repo(folder, environ) for folder in folders)
    return tuple(one for one in found if one is not None)[:MAX_CACHED]


def has_content(path: Path, blob: str) -> bool:
    """Return whether a file has the content that the hub calls `blob`."""
    # Blobs of large files (LFS) are named by SHA-256, other files by git's SHA-1.
    if len(blob) == DIGEST_CHARACTERS:
        digest = hashlib.sha256()
    else:
        head = b"blob %d\0" % path.stat().st_size  # as git does
        digest = hashlib.sha1(head, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == blob


def _read_repo(folder: Path, environ: Mapping[str, str]) -> CachedRepo | None:
    start = next((start for start in _KINDS if folder.name.startswith(start)), None)
    if start is None:
        return None
    name = folder.name.removeprefix(start).replace("--", "/", 1)
    try:
        check_hub_id(name)  # another program may have put anything there
        size_bytes = _weigh(folder / "blobs")
        revisions = _list_revisions(folder)
        is_broken = is_broken_off(folder / "blobs")
    except (OSError, ValueError):
        return None
    if not size_bytes and not revisions:
        return None
    kind = _KINDS[start]
    # Several revisions of a model may be whole, but runs use the newest one.
    is_whole = not is_broken and (kind != "model" or read_model(name, environ) is not None)
    return CachedRepo(
        kind=kind, name=name, size_bytes=size_bytes, revisions=revisions, is_whole=is_whole
    )


def _weigh(blobs: Path) -> int:
    """Return the size of the files of a folder; links are not followed."""
    total = 0
    with os.scandir(blobs) as found:
        for entry in found:
            about = entry.stat(follow_symlinks=False)
            total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return total


def _list_revisions(folder: Path) -> tuple[str, ...]:
    """Return the commits with a snapshot, that of the newest download first."""
    try:
        with os.scandir(folder / "snapshots") as found:
            dated = [(entry.stat().st_mtime, entry.name) for entry in found if entry.is_dir()]
    except FileNotFoundError:
        return ()
    names = [name for _, name in sorted(dated, reverse=True)][:MAX_REVISIONS]
    for name in names:
        check_revision(name)
    return tuple(names)

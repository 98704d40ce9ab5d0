"""Hashes of files, cached between runs for files that have not changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from agents.errors import ExpectedError, explain_os_error
from agents.shared.files.folder_files import open_regular
from agents.state import read_json, write_json

_BLOCK_BYTES = 1 << 20


def hash_file(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of a file; `on_read` gets the size of each block read, in bytes."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                if on_read is not None:
                    on_read(len(block))
    except OSError as error:
        raise explain_os_error(error, f"reading {path}") from error
    return digest.hexdigest()


def hash_files(paths: Sequence[Path], memory: Path | None) -> str:
    """Return the sha256 of one file, or the sha256 of the hashes of several files in order.

    Args:
        paths: files to hash.
        memory: folder of cached hashes, or None to hash without a cache.

    Raises:
        ExpectedError: a file cannot be read.
    """
    try:
        hashes = [hash_cached(path, memory) for path in paths]
    except OSError as error:
        raise explain_os_error(error, f"reading {error.filename}") from error
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{each}\n" for each in hashes).encode("ascii")).hexdigest()


def hash_cached(
    path: Path, memory: Path | None, on_read: Callable[[int], None] | None = None
) -> str:
    """Return the sha256 of a file, from the cache if path, size, mtime and inode are unchanged."""
    if memory is None:
        return hash_file(path, on_read)
    # Resolved, so that all links to a file share one entry.
    real = path.resolve()
    # The key is read before the file: a change meanwhile makes the entry invalid.
    key, note = _key(real), _note(real, memory)
    known = _recall(key, note)
    if known is not None:
        return known
    sha256 = hash_file(real, on_read)
    _write(note, key, sha256)
    return sha256


def remember_hash(path: Path, memory: Path | None, sha256: str) -> None:
    """Store the known hash of a file in the cache."""
    if memory is not None:
        real = path.resolve()
        _write(_note(real, memory), _key(real), sha256)


def _write(note: Path, key: list[str | int], sha256: str) -> None:
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(note, {"key": key, "sha256": sha256})
    except (OSError, ExpectedError):
        pass  # without a cache entry, the file is hashed again next time


def is_cached(path: Path, memory: Path | None) -> bool:
    """Return whether `hash_cached` can answer without reading this file."""
    if memory is None:
        return False
    real = path.resolve()
    return _recall(_key(real), _note(real, memory)) is not None


def _key(real: Path) -> list[str | int]:
    """Return a key that changes when the content of the file changes."""
    stat = real.stat()
    return [str(real), stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _note(real: Path, memory: Path) -> Path:
    # A hash of the path, because a path is no safe file name.
    return memory / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:24]}.json"


def _recall(key: list[str | int], note: Path) -> str | None:
    known = read_json(note) or {}
    return str(known["sha256"]) if known.get("key") == key else None

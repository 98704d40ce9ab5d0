"""Disk space reserved in advance, so that a full disk cannot silence a run.

A journal reserves blocks beyond its end while the disk has room, and grows into them later; its
size does not change. Space for the final record is held by an unnamed file, which is closed right
before the record is written. If its process is killed, the kernel frees the blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2), which `os.posix_fallocate` cannot pass."""
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, in bytes."""


class HeldSpace:
    """Reserved space in a folder, until `release` or the end of this process."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Reserve `size_bytes` on the disk of `folder`.

        Raises:
            OSError: the disk is full or refuses.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - held beyond this block
        try:
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError:
            self._file.close()
            raise

    def release(self) -> None:
        """Free the space."""
        self._file.close()


def hold_ahead(file: int, size_bytes: int) -> int:
    """Reserve space beyond the end of an open file that only grows.

    Args:
        file: descriptor that is open for writing.
        size_bytes: space to reserve; it is refilled when less than half is left.

    Returns:
        Bytes reserved now; 0 if the file system does not support it.
    """
    held = _held_bytes(file)
    if held < size_bytes // 2:
        # Errors are ignored: a file system without fallocate reserves nothing.
        libc = ctypes.CDLL(None, use_errno=True)
        end = os.fstat(file).st_size
        libc.fallocate(file, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size_bytes))
        held = _held_bytes(file)
    return held


def give_back(file: int) -> None:
    """Free the space reserved beyond the end of an open file."""
    with contextlib.suppress(OSError):
        # Truncating to the current size frees blocks beyond the end.
        os.ftruncate(file, os.fstat(file).st_size)


def _held_bytes(file: int) -> int:
    state = os.fstat(file)
    return max(0, state.st_blocks * _BLOCK_BYTES - state.st_size)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of an existing folder.

    Raises:
        OSError: the folder does not exist.
    """
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def free_files(folder: Path) -> int | None:
    """Return how many more files this user may create on the disk of an existing folder.

    None if the file system has no such limit, like btrfs.

    Raises:
        OSError: the folder does not exist.
    """
    state = os.statvfs(folder)
    return state.f_favail if state.f_files else None


def walk_files(place: Path) -> Iterator[os.stat_result]:
    """Yield the state of all files at and below a path, without following links."""
    paths = [str(place)]
    while paths:
        path = paths.pop()
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                paths += [entry.path for entry in os.scandir(path)]
            else:
                yield found
        except (FileNotFoundError, PermissionError):  # deleted meanwhile, or of another user
            continue


def freed_bytes(place: Path) -> int:
    """Return the bytes that deleting a folder frees; files with other hard links do not count."""
    return sum(found.st_blocks * _BLOCK_BYTES for found in walk_files(place) if found.st_nlink == 1)

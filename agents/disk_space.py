"""Disk space that is set aside beforehand, so that a full disk cannot silence a run.

A journal gets blocks beyond its end while there is room, and grows into them later; its size does
not change. What has to be written at the very end has a file without a name, whose blocks are given
back right before, and by the kernel if its process is killed: nothing of it stays on the disk.
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
"""Unit of `st_blocks`."""


class HeldSpace:
    """Space in a folder, held until `release` or the end of this process."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Hold `size_bytes` on the disk of `folder`.

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
        """Give the space back."""
        self._file.close()


def hold_ahead(file: int, size_bytes: int) -> int:
    """Hold space beyond the end of an open file that only grows.

    Args:
        file: descriptor, open for writing.
        size_bytes: space to hold; refilled when less than half of it is left.

    Returns:
        Bytes that are held now. 0 too where the file system cannot hold any.
    """
    held = _held_bytes(file)
    if held < size_bytes // 2:
        libc = ctypes.CDLL(None, use_errno=True)
        end = os.fstat(file).st_size
        libc.fallocate(file, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size_bytes))
        held = _held_bytes(file)
    return held


def give_back(file: int) -> None:
    """Give back what is held beyond the end of an open file."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, os.fstat(file).st_size)


def _held_bytes(file: int) -> int:
    state = os.fstat(file)
    return max(0, state.st_blocks * _BLOCK_BYTES - state.st_size)


def free_bytes(folder: Path) -> int:
    """Return how much of the disk of an existing folder this user may still fill.

    Raises:
        OSError: there is no such folder.
    """
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def free_files(folder: Path) -> int | None:
    """Return how many more files the disk of an existing folder takes from this user.

    None: the file system has no limit of its own, as btrfs.

    Raises:
        OSError: there is no such folder.
    """
    state = os.statvfs(folder)
    return state.f_favail if state.f_files else None


def walk_files(place: Path) -> Iterator[os.stat_result]:
    """Yield the state of the files at and below a place; links are not followed."""
    paths = [str(place)]
    while paths:
        path = paths.pop()
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                paths += [entry.path for entry in os.scandir(path)]
            else:
                yield found
        except (FileNotFoundError, PermissionError):  # deleted meanwhile, or another user's
            continue


def freed_bytes(place: Path) -> int:
    """Return the bytes that deleting a folder frees: files with another name elsewhere stay."""
    return sum(found.st_blocks * _BLOCK_BYTES for found in walk_files(place) if found.st_nlink == 1)

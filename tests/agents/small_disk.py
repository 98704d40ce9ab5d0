"""A file system of few bytes, to see what a full disk does. Needs root; skips without."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of that size at `path` for the block."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """Fill the disk under `folder` up to `leave_bytes` and return the file that did it.

    A second time it takes what has become free since.
    """
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while (room := _free_bytes(folder) - leave_bytes) > 0:
            file.write(bytes(min(room, 1 << 20)))
    return path


def _free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize

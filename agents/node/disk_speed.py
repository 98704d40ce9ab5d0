"""Measure how fast a node reads a large file from its disk, the limit for streamed weights.

A file that was just written is cached in memory, so its pages are dropped before the read. If the
system keeps them, like some network and overlay file systems, the speed is unknown.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path

FILE_BYTES = 512 << 20
"""Size of the file, in bytes; larger than the caches of SSDs that answer at once."""
# Minimum free space that a measurement leaves, in bytes.
_RESERVE_BYTES = 5 << 30
_PART_BYTES = 8 << 20
# No home SSD reaches this rate, in bytes per second: above it, the file came from memory.
_MOST_BYTES_PER_S = 20e9


def measure_disk(folder: Path, size_bytes: int = FILE_BYTES) -> float | None:
    """Return the rate of sequential reads in a folder, in bytes per second; None if unknown.

    It writes a file of `size_bytes` to the folder and removes it.
    """
    try:
        if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < size_bytes + _RESERVE_BYTES:
            return None
        with tempfile.TemporaryFile(dir=folder) as file:
            # Random bytes: like weights, they cannot be compressed by disk or file system.
            part = os.urandom(_PART_BYTES)
            for _ in range(size_bytes // _PART_BYTES):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            # After fsync, because dirty pages cannot be dropped.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_all(file.fileno())
    except OSError:
        return None


def _read_all(descriptor: int) -> float | None:
    size_bytes = os.fstat(descriptor).st_size
    # Page-aligned memory, as O_DIRECT requires.
    with mmap.mmap(-1, _PART_BYTES) as buffer, contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # a file system without O_DIRECT
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
            undo.callback(os.close, direct)
            descriptor = direct
        began, done = time.perf_counter(), 0
        while done < size_bytes:
            count = os.preadv(descriptor, [buffer], done)
            if count <= 0:
                return None
            done += count
        rate = done / max(1e-9, time.perf_counter() - began)
    return rate if rate < _MOST_BYTES_PER_S else None

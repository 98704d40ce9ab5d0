"""Measure how fast a node reads a large file from its disk, which bounds weights streamed from it.

A file that was just written is in memory, so its pages are dropped before it is read. Where the
system keeps them, as some network and overlay file systems do, nothing is measured.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path

FILE_BYTES = 512 << 20
"""Size of the file: beyond what SSDs answer from their own memory at once."""
# Free disk that a measurement leaves, in bytes.
_RESERVE_BYTES = 5 << 30
_PART_BYTES = 8 << 20
# Above this rate, in bytes per second, the file came from memory: no home SSD reaches it.
_MOST_BYTES_PER_S = 20e9


def measure_disk(folder: Path, size_bytes: int = FILE_BYTES) -> float | None:
    """Return the bytes per second of sequential reads in a folder; None: they cannot be measured.

    Writes a file of `size_bytes` there and removes it.
    """
    try:
        if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < size_bytes + _RESERVE_BYTES:
            return None
        with tempfile.TemporaryFile(dir=folder) as file:
            # What cannot be compressed, as weights cannot.
            part = os.urandom(_PART_BYTES)
            for _ in range(size_bytes // _PART_BYTES):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_all(file.fileno())
    except OSError:
        return None


def _read_all(descriptor: int) -> float | None:
    size_bytes = os.fstat(descriptor).st_size
    # Page-aligned memory, which direct reads need.
    with mmap.mmap(-1, _PART_BYTES) as buffer, contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # a file system without direct reads
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

"""Cap endless logs: keep the beginning and the newest part, and free the middle on the disk.

The middle becomes a hole: the file's size and the offset of every byte do not change, so the rank
can append to its own descriptor, and readers can follow the log by offset. A line at the beginning
of the hole says what is missing. File systems without holes keep the whole log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

HEAD_BYTES = 16 << 20
"""Size of the kept beginning, in bytes: the setup of the run and the first error."""
NEWEST_BYTES = 48 << 20
"""Size of the kept end, in bytes."""
SLACK_BYTES = 8 << 20
"""Growth before a log is cut again, in bytes, so that not every line causes a cut."""
BLOCK_BYTES = 4096
PIECE_BYTES = 1 << 20

# Flags of fallocate(2).
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def cap_log(path: Path) -> bool:
    """Cut the middle out of a log that is too large; return whether it was cut.

    Raises:
        OSError: the file cannot be opened, or its file system has no holes.
    """
    state = os.stat(path)
    if used_bytes(state) <= HEAD_BYTES + NEWEST_BYTES + SLACK_BYTES:
        return False
    # Whole blocks only: a part of a block is not freed, but filled with zeros.
    end = (state.st_size - NEWEST_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    if sys.platform.startswith("linux"):
        # Without O_APPEND, since Linux's pwrite would append despite its offset.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The notice fills the block before the hole.
            _punch(file, HEAD_BYTES + BLOCK_BYTES, end)
            os.pwrite(file, _notice(end - HEAD_BYTES), HEAD_BYTES)
        finally:
            os.close(file)
        return True
    else:
        raise OSError("this system makes no holes in files")


def used_bytes(state: os.stat_result) -> int:
    """Return the disk space of a file without its holes, or its size if that is not known."""
    blocks = getattr(state, "st_blocks", None)
    return state.st_size if blocks is None else min(state.st_size, blocks * 512)


def read_kept(file: int, offset: int, max_bytes: int) -> tuple[int, bytes]:
    """Return the offset and content of the next kept bytes from `offset` on.

    Empty content: the end of the file.
    """
    start = _seek(file, offset, "SEEK_DATA", offset)
    # Stop at the next hole: its zeros were never in the log.
    end = _seek(file, start, "SEEK_HOLE", start + max_bytes)
    os.lseek(file, start, os.SEEK_SET)
    return start, os.read(file, min(max_bytes, max(end - start, 0)))


def read_pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of all kept parts.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        offset = 0
        while True:
            offset, data = read_kept(file.fileno(), offset, PIECE_BYTES)
            if not data:
                return
            yield offset, data
            offset += len(data)


def _seek(file: int, offset: int, whence: str, otherwise: int) -> int:
    """Return the offset of data or a hole, or `otherwise` at the end or without support for
    holes.
    """
    try:
        return os.lseek(file, offset, getattr(os, whence))
    except (AttributeError, OSError):
        return otherwise


def _notice(num_bytes: int) -> bytes:
    """Return the line at the hole's beginning, padded to one block, so that no zero bytes follow
    it.
    """
    text = (
        f"\n[rackless] {num_bytes:,} bytes of this log were dropped here to spare the disk; its "
        f"first {HEAD_BYTES >> 20} MiB and its newest {NEWEST_BYTES >> 20} MiB are kept."
    )
    return text.encode("ascii").ljust(BLOCK_BYTES - 1) + b"\n"


def _punch(file: int, start: int, end: int) -> None:
    import ctypes  # on use: most readers of logs never cap one

    # Python has only posix_fallocate, which cannot punch holes.
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
    # 64 bits: ctypes would pass an int of 32, and logs exceed 4 GiB.
    place, size = ctypes.c_int64(start), ctypes.c_int64(end - start)
    if libc.fallocate(ctypes.c_int(file), flags, place, size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

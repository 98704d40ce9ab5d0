"""A lock between processes that the operating system frees when its holder dies.

The window and the command may work on the same files at once. `flock` on POSIX, `msvcrt.locking` on
Windows: both belong to the open file, so a killed process never leaves a lock behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, made when missing, inside the block; waits for other holders."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


if sys.platform == "win32":

    def _lock(handle: int) -> None:
        # LK_LOCK gives up after ten tries, one a second; a mirror is held for milliseconds.
        while True:
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return
            except OSError:
                time.sleep(0.01)

else:

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX)


def try_locked(path: Path) -> int | None:
    """Take the lock file `path` without waiting; return its open handle, or None when held.

    The lock lasts until the handle is closed or the process ends.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        if sys.platform == "win32":
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle

"""File locks between processes, which the operating system releases when their holder dies.

The window and the command line may work on the same files at once. `flock` on POSIX and
`msvcrt.locking` on Windows both belong to the open file, so a killed process leaves no lock behind.

The `filelock` package is not used, since it polls every 50 ms, while `flock` lets the kernel wake
the waiter at once (a mirror takes its lock for every chunk of every stream). Its lock also ends
with a Python object, while these have to last as long as the process or the handle.
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
    """Hold the lock file `path` inside the block, after other holders; create it if missing."""
    # O_BINARY exists on Windows only.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


if sys.platform == "win32":

    def _lock(handle: int) -> None:
        # LK_LOCK tries once a second and gives up after ten; a mirror is held for milliseconds.
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
    """Take the lock file `path` without waiting.

    Returns:
        The open handle, whose closing releases the lock, or None if another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    # Python's handles are not inheritable, so a child process does not keep the lock.
    try:
        if sys.platform == "win32":
            # Windows locks ranges of bytes; one byte is enough, even in an empty file.
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle

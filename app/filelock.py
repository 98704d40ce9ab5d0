"""File locks between processes, which the operating system releases when their holder dies.

The window and the command line may work on the same files at once. `flock` on POSIX and
`msvcrt.locking` on Windows both belong to the open file, so a killed process leaves no lock behind.
A suspended one does, so its holder writes into the file who it is, and a waiter says so and gives
up after a while.

The `filelock` package is not used: its lock ends with a Python object, while these have to last as
long as the process or the handle, and it does not know its holder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from agents.shared.files.secrets import hide_secrets
from app.errors import LockHeld, UserError
from app.text import show_moment

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NOTICE_S = 2.0
"""Wait after which the holder of a lock is named, in seconds."""
LIMIT_S = 30.0
"""Maximum wait for a lock that is held for moments only, in seconds."""
_TRIES, _TRY_PAUSE_S = 10, 0.01
_PAUSES_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02)
# Beyond the record of the holder, since Windows forbids others to read a locked byte.
_LOCKED_BYTE = 1 << 30
_MAX_RECORD_BYTES = 1000
_MAX_COMMAND_CHARACTERS = 120
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LockHolder:
    """Process that holds a lock, by its own record in the file."""

    pid: int
    command: str
    since_s: float
    """Time at which it took the lock, in seconds since the epoch."""

    @property
    def is_suspended(self) -> bool:
        """True if the process was suspended, as by Ctrl-Z; False also where that is unknown."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def wake(self) -> None:
        """Continue the process if it is suspended, as `fg` does."""
        if sys.platform != "win32" and self.is_suspended:
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                os.kill(self.pid, signal.SIGCONT)

    def __str__(self) -> str:
        state = ", which is suspended" if self.is_suspended else ""
        since = show_moment(self.since_s, time.time())
        return f"process {self.pid} ({self.command}) since {since}{state}"

    @property
    def advice(self) -> str:
        """Advice to the user."""
        if self.is_suspended:
            return f"Continue it (fg, or kill -CONT {self.pid}), or end it: kill -9 {self.pid}"
        return f"Wait until it ends, or end it: kill {self.pid}"


def describe_process() -> str:
    """Return the command line of this process for the user."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else ["python"]
    if words[0] in ("__main__.py", "-c", "-m"):
        words[0] = "rackless"
    if words in (["rackless"], ["rackless", "gui"]):
        return "the window"
    return hide_secrets(" ".join(words))[:_MAX_COMMAND_CHARACTERS]


@contextlib.contextmanager
def locked(path: Path, limit_s: float | None = LIMIT_S) -> Iterator[None]:
    """Hold the lock file `path` inside the block, after other holders; create it if missing.

    After `NOTICE_S` a warning says who holds it.

    Raises:
        LockHeld: another process held it for `limit_s`; None: no limit, except for a process that
            is suspended.
    """
    handle = _open(path)
    try:
        _wait(handle, path, limit_s)
        _sign(handle)
        yield
    finally:
        os.close(handle)


def try_locked(path: Path) -> int | None:
    """Take the lock file `path` without waiting.

    Returns:
        The open handle, whose closing releases the lock, or None if another process holds it.
    """
    handle = _open(path)
    if not _try(handle):
        os.close(handle)
        return None
    return handle


def try_held(path: Path) -> int | None:
    """Take the lock file as `try_locked` does, and record this process as its holder."""
    # Others take a lock for an instant to test it, and must not be mistaken for a holder.
    for _ in range(_TRIES):
        handle = try_locked(path)
        if handle is not None:
            _sign(handle)
            return handle
        time.sleep(_TRY_PAUSE_S)
    return None


def is_held(path: Path) -> bool:
    """Return True if a living process holds the lock."""
    # Taking the lock would create the file, and fails if its folder is missing.
    if not path.exists():
        return False
    handle = _open(path)
    try:
        # Shared, so that two tests do not take each other for the holder.
        return not _try(handle, is_shared=True)
    finally:
        os.close(handle)


def read_holder(path: Path) -> LockHolder | None:
    """Return the process that last took the lock, or None if it left no record.

    Only meaningful while the lock is held, since a holder leaves its record behind.
    """
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(_MAX_RECORD_BYTES))
        return LockHolder(
            pid=int(value["pid"]), command=str(value["command"]), since_s=float(value["since_s"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_held(path: Path) -> LockHeld:
    """Return the error for a lock that another process keeps."""
    holder = read_holder(path)
    if holder is None:
        return LockHeld(
            f"{path} is in use by another process, which left no record of itself",
            f"End other Rackless processes; on Linux, `fuser {path}` names them.",
            where=str(path),
        )
    return LockHeld(f"{path} is in use by {holder}", f"{holder.advice}.", where=str(path))


def _open(path: Path) -> int:
    # O_BINARY exists on Windows only. Python's handles are not inheritable, so a child process
    # does not keep the lock.
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    except (PermissionError, IsADirectoryError) as error:
        if not path.exists():
            raise  # its folder cannot be written, which callers explain
        raise UserError(
            f"the lock file {path} cannot be opened: {error.strerror}",
            "It may be left by another user, such as root after `sudo`. End Rackless there, then "
            "delete it: no data is in it.",
            where=str(path),
        ) from error


def _try(handle: int, *, is_shared: bool = False) -> bool:
    try:
        if sys.platform == "win32":
            os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _wait(handle: int, path: Path, limit_s: float | None) -> None:
    began_s = time.monotonic()
    is_said, tries = False, 0
    # Polled, since a blocking flock has no timeout.
    while not _try(handle):
        waited_s = time.monotonic() - began_s
        if waited_s >= (LIMIT_S if limit_s is None else limit_s) and (
            limit_s is not None or _is_holder_suspended(path)
        ):
            raise refuse_held(path)
        if waited_s >= NOTICE_S and not is_said:
            is_said = True
            _log.warning("waiting: %s", refuse_held(path))
        time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
        tries += 1


def _is_holder_suspended(path: Path) -> bool:
    holder = read_holder(path)
    return holder is not None and holder.is_suspended


def _sign(handle: int) -> None:
    """Write who holds the lock; a full disk does not matter."""
    holder = LockHolder(pid=os.getpid(), command=describe_process(), since_s=time.time())
    # Padded instead of truncated: a reader never sees half a record.
    record = json.dumps(asdict(holder)).encode("ascii").ljust(400)
    with contextlib.suppress(OSError):
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, record)

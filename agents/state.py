"""The agent's home folder, durable JSON files, file locks, and identities of processes.

A reader of a JSON file sees the old or the new content, never a part: the file is written under a
temporary name, fsynced and renamed, and its folder is fsynced. A process is identified by pid,
start time and boot id together, because pids are reused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.json_text import parse_json
from agents.contract.names import MAX_ATTEMPT, is_safe_name
from agents.contract.run_layout import CHECKPOINTS, RUNS, attempt_folder
from agents.contract.wire import WireError
from agents.errors import ExpectedError, explain_os_error

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def archive_path() -> str:
    """Return the entry of PYTHONPATH for `import agents`: the pushed archive or a folder."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def agent_command() -> list[str]:
    """Return the argv that starts this same agent, to be followed by a command."""
    archive = archive_path()
    # -I ignores the user's PYTHONPATH and site folder; a source tree is found only by PYTHONPATH.
    if os.path.isfile(archive):
        return [sys.executable, "-I", archive]
    return [sys.executable, "-m", "agents"]


def require_name(value: str, what: str) -> str:
    """Return `value` if it is safe as one component of a path.

    Raises:
        ExpectedError: it is too long, or has characters other than letters, digits, `.`, `_`, `-`.
    """
    if not is_safe_name(value):
        raise ExpectedError(
            f"{what} {value[:80]!r} is not allowed.",
            "Use 1 to 128 letters, digits, dots, underscores and dashes; start with a letter or "
            "a digit",
        )
    return value


@dataclass(frozen=True)
class Home:
    """Paths of the folders and files of an agent's home; creates nothing."""

    path: Path

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def environments(self) -> Path:
        return self.path / "environments"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry"

    @property
    def leases(self) -> Path:
        return self.path / "leases"

    @property
    def runs(self) -> Path:
        return self.path / RUNS

    def run(self, run_id: str) -> Path:
        return self.runs / require_name(run_id, "The run id")

    def attempt(self, run_id: str, attempt: int) -> Path:
        """Return the folder of an attempt.

        Raises:
            ExpectedError: the number or the run id is invalid.
        """
        if not 1 <= attempt <= MAX_ATTEMPT:
            raise ExpectedError(f"There is no attempt {attempt}: attempts count from 1.")
        return attempt_folder(self.run(run_id), attempt)

    def checkpoints(self, run_id: str) -> Path:
        return self.run(run_id) / CHECKPOINTS


def open_home() -> Home:
    """Create the agent's home folder if necessary, and test that it is writable.

    Raises:
        ExpectedError: it cannot be created or written, belongs to another user, or contains other
            files.
    """
    named = os.environ.get("RACKLESS_AGENT_HOME")
    path = Path(named) if named else Path.home() / ".local" / "share" / "rackless-agent"
    home = Home(path.absolute())
    try:
        _require_home(home)
        for folder in (home.path, home.telemetry, home.leases, home.runs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _keep_to_us(home.path)
        _try_to_write(home.path / f".trial.{os.getpid()}")
    except OSError as error:
        raise explain_os_error(error, f"preparing the agent's home folder {home.path}") from error
    return home


def _require_home(home: Home) -> None:
    """Refuse an existing folder with other files, because making it private would lock users out.

    Raises:
        ExpectedError: it contains files that are not the agent's.
        OSError: it cannot be read.
    """
    folder = home.path
    # `telemetry` marks a home in use; a private folder locks no one out.
    if not folder.is_dir() or home.telemetry.exists() or not folder.stat().st_mode & _OTHERS:
        return
    # A mounted disk has `lost+found` from the start. The master may already have created `agents`,
    # which contains the agent's own program.
    ours = ("lost+found", "agents")
    others = [name for name in os.listdir(folder) if name not in ours and name[:1] != "."]
    if others:
        raise ExpectedError(
            f"The agent's home folder {folder} holds other files, such as {min(others)}, and other "
            "users of this node can open it; it would be closed to them.",
            "Set RACKLESS_AGENT_HOME there to a new folder, such as one inside it",
        )


def _keep_to_us(folder: Path) -> None:
    """Make the home private.

    Raises:
        ExpectedError: it belongs to another user, or its file system has no permissions.
        OSError: its mode cannot be changed.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ExpectedError(
            f"The agent's home folder {folder} belongs to another user of this node.",
            "Log in as that user, or set RACKLESS_AGENT_HOME there to a folder of your own",
        )
    if found.st_mode & _OTHERS:
        folder.chmod(stat.S_IRWXU)
        if folder.stat().st_mode & _OTHERS:
            raise ExpectedError(
                f"The agent's home folder {folder} is on a disk that cannot keep other users out.",
                "Set RACKLESS_AGENT_HOME there to a folder on a disk with permissions",
            )


def _try_to_write(trial: Path) -> None:
    """Create and remove a file."""
    try:
        trial.touch(mode=0o600)
        trial.unlink()
    except OSError as error:
        # The agent must start even on a full disk, or the master could not report it.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


# ---------------------------------------------------------------- durable files


def write_json(path: Path, value: Any) -> None:
    """Replace the content of the file by `value`, durably.

    Raises:
        ExpectedError: the disk is full or read-only; the old file is unchanged.
    """
    write_bytes(path, json.dumps(value, separators=(",", ":")).encode("ascii"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of the file by `data`, durably. Raises like `write_json`."""
    # The clock in the name, because two threads of a process may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        try:
            with open(temporary, "xb", opener=_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        fsync_folder(path.parent)
    except OSError as error:
        raise explain_os_error(error, f"writing {path}") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def fsync_folder(path: Path) -> None:
    """Make creations and renames in this folder durable."""
    # A rename is durable only after an fsync of its folder.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file; None if it is missing or unreadable."""
    try:
        value = parse_json(path.read_bytes(), finite=False)
    except (OSError, WireError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, busy: str) -> Iterator[None]:
    """Hold an exclusive lock on the file within the block; the kernel frees it after a kill.

    Raises:
        ExpectedError: another process held it for `timeout_s`; the message is `busy`.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain_os_error(error, f"opening {path}") from error
    try:
        if not take_lock(lock, timeout_s):
            raise ExpectedError(busy, "Wait until that has finished, then try again")
        yield
    finally:
        os.close(lock)


def take_lock(lock: int, timeout_s: float) -> bool:
    """Lock an open file exclusively; return False if another process holds it for `timeout_s`."""
    # Polled, because a blocking flock has no timeout, and an alarm would hit the whole process.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


# ---------------------------------------------------------------- identities of processes


@dataclass(frozen=True)
class Identity:
    """Identity of a process, different from that of a later process with the same pid."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process."""
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_ticks": self.start_ticks, "boot_id": self.boot_id}

    def is_alive(self) -> bool:
        # Start ticks count from boot, so they may repeat after a restart.
        return self.boot_id == boot_id() and read_start_ticks(self.pid) == self.start_ticks


def identity_from(value: dict[str, Any] | None) -> Identity | None:
    """Return the identity in a JSON object, or None."""
    try:
        value = value or {}
        return Identity(int(value["pid"]), int(value["start_ticks"]), str(value["boot_id"]))
    except (KeyError, TypeError, ValueError):
        return None


def identify(pid: int) -> Identity | None:
    """Return the identity of a living process, or None if no process has this pid."""
    ticks = read_start_ticks(pid)
    return None if ticks is None else Identity(pid, ticks, boot_id())


def read_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # A zombie has ended, although its pid is still taken.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    """Return the kernel's id of this boot, or an empty string."""
    try:
        with open(_BOOT_ID, "rb") as file:
            return file.read().decode("ascii").strip()
    except OSError:
        return ""


def boot_time_s() -> float | None:
    """Return the time of this PC's start by its current clock, in seconds since 1970."""
    try:
        with open("/proc/stat", "rb") as file:
            return next(float(line.split()[1]) for line in file if line.startswith(b"btime "))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def tells_full_disk(error: BaseException) -> bool:
    """Return whether an error of the system or of safetensors means that the disk is full."""
    # safetensors raises its own class, whose text contains the system's message.
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)

"""Paths of the files of the master.

All files are below one folder, `$RACKLESS_HOME`, so that a test, the demo or a second user can have
a separate Rackless by setting one variable. All folders are private to the user (0700), since logs
may quote training data.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from agents.contract.names import MAX_ATTEMPT, is_safe_name
from agents.contract.run_layout import RUNS, attempt_folder, is_stream
from agents.shared.files.full_disk import removing_half
from app.errors import UserError

HOME_VARIABLE = "RACKLESS_HOME"
BUSY_FILE_S = 2.0
"""Maximum wait for a file that another program has open, in seconds."""
RESERVE_BYTES = 512 << 20
"""Space that data from nodes leaves free on a disk of this PC, in bytes."""
RESERVE_SHARE = 0.02
"""The same as a share of the disk; the smaller of the two counts."""


def default_home() -> Path:
    """Return `$RACKLESS_HOME`, or the operating system's folder for application data."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs  # on use: it takes 30 ms

    return Path(platformdirs.user_data_dir("rackless", appauthor=False))


def whole_path(path: Path) -> Path:
    """Return an absolute path without `~`, `..` and a final link, the one spelling of a folder.

    Raises:
        OSError: links form a loop, or there is no user of that name.
    """
    try:
        path = path.expanduser().absolute()
    except RuntimeError as error:
        raise OSError(errno.ENOENT, "there is no such user", str(path)) from error
    try:
        return path.resolve() if ".." in path.parts or path.is_symlink() else path
    except RuntimeError as error:  # Python before 3.13 raises it for a loop of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def is_same_folder(path: Path, other: Path) -> bool:
    """Return whether two paths are the same existing folder."""
    try:
        return path.samefile(other)
    except OSError:
        return False


class UnsafeName(UserError):
    """Raised for a name that would lead out of its folder.

    Such a name can only come from a malicious node that sent it to an older version.
    """

    def __init__(self, what: str, name: object) -> None:
        super().__init__(
            f"{what} {ascii(name)[:200]} would lead out of the folder of Rackless, so its files "
            "are not touched",
            "Delete the run: that removes it from the list and nothing else",
        )


@dataclass(frozen=True, slots=True)
class Paths:
    """Names of files and folders below one home. Creates nothing.

    A path built from a name is always a direct child of its folder, else `UnsafeName` is raised.
    """

    home: Path

    @property
    def database(self) -> Path:
        return self.home / "rackless.sqlite3"

    @property
    def nodes_file(self) -> Path:
        """Readable copy of the node table, from which a lost database is restored."""
        return self.home / "nodes.json"

    @property
    def settings_file(self) -> Path:
        return self.home / "settings.json"

    @property
    def master_key(self) -> Path:
        """Private key with which this home signs its launches; never sent, never reported."""
        return self.home / "master.key"

    @property
    def runs(self) -> Path:
        return self.home / RUNS

    @property
    def configs(self) -> Path:
        """Cache of model configs from the hub."""
        return self.home / "configs"

    @property
    def wheels(self) -> Path:
        """Packages that this PC fetched for nodes."""
        return self.home / "wheels"

    @property
    def environments(self) -> Path:
        """Locks of torch builds made on this PC."""
        return self.home / "environments"

    @property
    def recipes(self) -> Path:
        """Recipes that the user saved."""
        return self.home / "recipes"

    @property
    def demo(self) -> Path:
        return self.home / "demo"

    @property
    def last_check(self) -> Path:
        """Rows of the last check, for reports."""
        return self.home / "last-check.json"

    @property
    def reports(self) -> Path:
        """Tracebacks of failed commands, for bug reports."""
        return self.home / "reports"

    def run(self, run_id: str) -> Path:
        return _child(self.runs, "the run", run_id)

    def attempt(self, run_id: str, attempt: int) -> Path:
        if not 1 <= attempt <= MAX_ATTEMPT:
            raise UnsafeName("the attempt", attempt)
        return attempt_folder(self.run(run_id), attempt)

    def part(self, run_id: str, attempt: int, node: str) -> Path:
        """Return the folder with the mirrors of one node's part of an attempt."""
        return _child(self.attempt(run_id, attempt), "the node", node)

    def stream(self, run_id: str, attempt: int, node: str, stream: str) -> Path:
        """Return the mirror of one node's log or journal."""
        if not is_stream(stream):
            raise UnsafeName("the log", stream)
        return self.part(run_id, attempt, node) / stream


def _child(folder: Path, what: str, name: str) -> Path:
    path = folder / name if is_safe_name(name) else folder
    # The path is checked, too, since separators depend on the system.
    if path.parent != folder or path.name != name:
        raise UnsafeName(what, name)
    return path


def leads_through_link(path: Path, below: Path) -> bool:
    """Return whether `path`, or a folder between it and `below`, is a symbolic link."""
    steps = (path, *path.parents)
    return any(step.is_symlink() for step in steps[: steps.index(below)])


def room_bytes(folder: Path) -> int:
    """Return the bytes that data from nodes may fill on the disk of `folder`."""
    import shutil  # on use: it loads all archive formats, which lists do not need

    # The rest is a reserve for the database and other files that this PC has to write.
    disk = shutil.disk_usage(folder)
    return disk.free - min(RESERVE_BYTES, int(disk.total * RESERVE_SHARE))


def replace_text(path: Path, text: str, *, is_synced: bool = False) -> None:
    """Write a private file atomically: a reader sees the old or the new text, never a part.

    Args:
        path: the file.
        text: its content.
        is_synced: True if the content must be on the disk before the file has its name.

    Raises:
        OSError: the file cannot be written.
    """
    # In the same folder, since a rename is atomic only within one file system.
    with removing_half(path.with_name(path.name + ".new")) as temporary:
        # In a folder made by others, a link of that name would redirect the write.
        if temporary.is_symlink():
            temporary.unlink()
        with open_private(temporary, "w") as file:
            file.write(text.encode("utf-8"))
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        replace_file(temporary, path)


def replace_file(source: Path, target: Path) -> None:
    """Rename a file over another one; on Windows, wait until the other one is not open.

    Raises:
        OSError: it cannot be renamed.
    """
    deadline_s = time.monotonic() + BUSY_FILE_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            # Windows refuses while a reader or a virus scanner holds the file, for milliseconds.
            # On other systems waiting does not help.
            is_final = sys.platform != "win32" or time.monotonic() > deadline_s
            if is_final:
                raise
        time.sleep(0.02)


def open_private(path: Path, mode: Literal["w", "a", "x"]) -> IO[bytes]:
    """Open a file for writing; a new file is readable only by this user.

    Raises:
        OSError: it cannot be opened.
    """
    return open(path, f"{mode}b", opener=_open_private_handle)


def _open_private_handle(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def private_folder(path: Path) -> Path:
    """Create `path` and its missing parents, private to this user, and return it.

    Raises:
        OSError: it is a file, or cannot be created.
    """
    # One by one, since `mkdir(parents=True)` gives parents the default mode.
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)  # raises if it is a file
    return path

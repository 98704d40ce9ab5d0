"""Paths of the files of the master.

Everything lives below one folder, `$RACKLESS_HOME`, so that a test, the demo or a second user can
have a separate Rackless by setting one variable. All folders are private to the user (0700):
logs may quote training data.
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
from app.errors import UserError

HOME_VARIABLE = "RACKLESS_HOME"
BUSY_FILE_S = 2.0
"""Maximum wait for a file that another program has open, in seconds."""
RESERVE_BYTES = 512 << 20
"""Room that the data of nodes leaves on a disk of this PC."""
RESERVE_SHARE = 0.02
"""The same as a share of the disk, for small ones; the smaller of both counts."""


def default_home() -> Path:
    """Return `$RACKLESS_HOME`, or the OS's own place for app data."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs  # 30 ms, needed only here

    return Path(platformdirs.user_data_dir("rackless", appauthor=False))


def whole_path(path: Path) -> Path:
    """Return an absolute path without `~` and `..`, with a link resolved.

    So each folder has one spelling by which it is found again.

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

    Such a name can only come from a node that lied to an older version, which stored it.
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

    A path that is built from a name is a direct child of the folder that it is meant for, whatever
    the name is; else `UnsafeName` is raised.
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
    def runs(self) -> Path:
        return self.home / RUNS

    @property
    def configs(self) -> Path:
        """Cache of model configs from the hub."""
        return self.home / "configs"

    @property
    def wheels(self) -> Path:
        """Packages that this PC has fetched for nodes."""
        return self.home / "wheels"

    @property
    def environments(self) -> Path:
        """Locks of builds of torch that this PC has made."""
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
        """Traces of faults of commands, for bug reports."""
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
    # Asked of the path as well: what a separator is depends on the system.
    if path.parent != folder or path.name != name:
        raise UnsafeName(what, name)
    return path


def leads_through_link(path: Path, below: Path) -> bool:
    """Return whether `path`, or a folder between it and `below`, is a symbolic link."""
    steps = (path, *path.parents)
    return any(step.is_symlink() for step in steps[: steps.index(below)])


def room_bytes(folder: Path) -> int:
    """Return how much others' data may fill of the disk of `folder`; the rest is a reserve.

    The database and all else that this PC has to write need room, too.
    """
    import shutil  # with all archive formats, which no list needs

    disk = shutil.disk_usage(folder)
    return disk.free - min(RESERVE_BYTES, int(disk.total * RESERVE_SHARE))


def replace_text(path: Path, text: str) -> None:
    """Write a private file atomically: a reader sees the old text or the new, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    # In the same folder: a rename replaces atomically only within one file system.
    temporary = path.with_name(path.name + ".new")
    # A link of that name, in a folder that others made, would be written through.
    if temporary.is_symlink():
        temporary.unlink()
    with open_private(temporary, "w") as file:
        file.write(text.encode("utf-8"))
    replace_file(temporary, path)


def replace_file(source: Path, target: Path) -> None:
    """Rename a file over another one; on Windows, wait until nobody has that one open.

    A reader or a virus scanner holds a file for milliseconds, in which Windows refuses.

    Raises:
        OSError: it cannot be renamed.
    """
    deadline_s = time.monotonic() + BUSY_FILE_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            # Elsewhere a permission does not come by waiting.
            is_final = sys.platform != "win32" or time.monotonic() > deadline_s
            if is_final:
                raise
        time.sleep(0.02)


def open_private(path: Path, mode: Literal["w", "a", "x"]) -> IO[bytes]:
    """Open a file to write, which only this user may read if it is new.

    Raises:
        OSError: it cannot be opened.
    """
    return open(path, f"{mode}b", opener=_open_for_us)


def _open_for_us(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def private_folder(path: Path) -> Path:
    """Create `path` and those parents that are missing, private to this user, and return it.

    Raises:
        OSError: it is a file, or cannot be created.
    """
    # One by one: `mkdir(parents=True)` gives parents the mode of the user's other folders.
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)  # raises where it is a file
    return path

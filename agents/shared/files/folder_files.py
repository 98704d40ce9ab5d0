"""List, check and open files of folders from untrusted sources.

A link in a downloaded folder can name any file of the user who reads it, and a pipe or device in
place of a file never ends. So a link is followed only to a target inside the folder, or to the
hub's cache, whose snapshots are links to its own blobs; everything else except ordinary files is
refused by name. A hard link cannot be distinguished from a file of the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from agents.contract.hub import hub_cache

MAX_JSON_BYTES = 64 << 20
"""Maximum size of small files that are read as a whole, such as a proof, in bytes."""
_REPOSITORIES = ("models--", "datasets--", "spaces--")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class ForeignFile(OSError):
    """Raised for a refused file. Neither message nor hint ends with a full stop.

    It is an OSError, so that code without its own handling treats the file as unreadable.
    """

    def __init__(self, path: Path, reason: str, hint: str) -> None:
        super().__init__(errno.EACCES, f"it {reason}", str(path))
        self.message = f"{path} {reason}"
        self.hint = hint

    def __str__(self) -> str:
        return self.message


def require_own(path: Path, root: Path) -> None:
    """Check that a file or folder below `root` is ordinary and that no link leads out of `root`.

    Raises:
        ForeignFile: it is not.
        OSError: it cannot be read.
    """
    target = _resolve(path)
    if not _is_within(target, _allowed(root)):
        raise ForeignFile(
            path,
            f"leads out of {root}, to {target}",
            "Replace the link by a copy of what it should hold, or remove it",
        )
    path.lstat()  # raises FileNotFoundError: a missing file is not foreign
    if not target.exists():
        raise ForeignFile(path, f"is a link to {target}, which does not exist", "Remove the link")
    if not target.is_dir():
        _require_regular(path, os.stat(target).st_mode)


def _resolve(path: Path) -> Path:
    if os.name == "nt" and path.is_symlink() and is_network_path(os.readlink(path)):
        # Even a check of its existence would log in to that computer.
        raise ForeignFile(path, "is a link to another computer", "Remove the link")
    try:
        return path.resolve(strict=False)
    except (OSError, RuntimeError) as error:  # a loop, before Python 3.13
        raise ForeignFile(path, "is a link that leads in a circle", "Remove the link") from error


def is_network_path(name: str) -> bool:
    r"""Return whether Windows would contact another computer for this path.

    >>> [is_network_path(name) for name in (r"\\host\share\x", "//host/x", r"\\?\C:\x", "/x")]
    [True, True, False, False]
    """
    name = name.replace("/", "\\")
    # `\\?\` and `\\.\` are local, except for `\\?\UNC\`.
    if name.startswith(("\\\\?\\", "\\\\.\\")):
        return name[4:7].upper() == "UNC"
    return name.startswith("\\\\")


def _allowed(root: Path) -> list[Path]:
    real = root.resolve()
    allowed = [real, hub_cache(os.environ).resolve()]
    # A cache may be elsewhere than this user's settings say, so its structure identifies it. One of
    # its repositories may be a link to another disk, under another name.
    for parent in (*real.parents, *root.absolute().parents):
        if parent.name == "snapshots" and parent.parent.name.startswith(_REPOSITORIES):
            # The blobs are not resolved, since a foreign archive can link them anywhere.
            allowed.append(parent.parent.resolve() / "blobs")
    return allowed


def _is_within(path: Path, folders: list[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def require_regular(path: Path) -> None:
    """Check that a path leads to an ordinary file, which a reader can neither wait for nor fill.

    Raises:
        ForeignFile: it is a folder, pipe, socket or device.
        OSError: it cannot be found.
    """
    _require_regular(path, os.stat(path).st_mode)


def name_kind(path: Path) -> str:
    """Return what is at a path, such as `a pipe`; empty: a file, or nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no ordinary file")


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no ordinary file")
        raise ForeignFile(path, f"is {kind}, not a file", "Remove it, or name another file")


def open_regular(path: Path, root: Path | None = None) -> BufferedReader:
    """Open an ordinary file for reading, without ever waiting for the other end of a pipe.

    Args:
        path: file, or link to one.
        root: folder that no link may lead out of; None: the user named this file.

    Raises:
        ForeignFile: it is not an ordinary file, or leads out of the folder.
        OSError: it cannot be opened.
    """
    if root is not None:
        require_own(path, root)
    # Before it is opened, which makes some devices act.
    require_regular(path)
    # O_NONBLOCK: opening a pipe that came in its place would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0))
    try:
        _require_regular(path, os.fstat(handle).st_mode)
        # Check the open file, since the path may have become a link after the first check.
        opened = Path(f"/proc/self/fd/{handle}")
        if root is not None and opened.is_symlink():
            target = Path(os.readlink(opened))
            if target.exists() and not _is_within(target, _allowed(root)):
                raise ForeignFile(path, f"leads out of {root}, to {target}", "Remove the link")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, root: Path | None = None, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of an ordinary file.

    Raises:
        ForeignFile: it is not one, leads out of `root`, or is larger than `limit` bytes.
        OSError: it cannot be read.
    """
    # One byte more than the limit shows whether there is more.
    with open_regular(path, root) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ForeignFile(
            path, f"has more than {limit} bytes, and at most those are read", "Name another file"
        )
    return data


def is_own(path: Path, root: Path) -> bool:
    """Return whether `require_own` would accept an existing file."""
    try:
        require_own(path, root)
    except OSError:
        return False
    return True


def list_own(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Return the files of a folder, excluding subfolders, whose names are wanted, in order.

    Raises:
        ForeignFile: one of them is not an ordinary file, or leads out of the folder.
        OSError: the folder cannot be read.
    """
    found = sorted(path for path in folder.iterdir() if wanted(path.name) and not path.is_dir())
    for path in found:
        _require_own_entry(path, folder)
    return found


def walk_own(folder: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files in and below a folder whose names are wanted, visiting no folder twice.

    Hidden entries are skipped, and so are links to a parent of the folder.

    Raises:
        ForeignFile: a file is not ordinary, or a file or folder leads out of the folder.
        OSError: a part cannot be read.
    """
    seen = {str(parent) for parent in folder.resolve().parents}
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(root)
        # Links may form circles, or name a folder that was read under its own name.
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        # Assigned in place: os.walk descends into what is left in this list.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            place = Path(root, name)
            if place.is_symlink() and os.path.realpath(place) not in seen:
                require_own(place, folder)
        for name in names:
            if not name.startswith(".") and wanted(name):
                _require_own_entry(Path(root, name), folder)
                yield Path(root, name)


def _require_own_entry(path: Path, root: Path) -> None:
    """Check an entry like `require_own`, given that its folder is already checked."""
    mode = path.lstat().st_mode
    # Resolving a path takes many system calls, and most files are not links.
    if stat.S_ISLNK(mode):
        require_own(path, root)
    else:
        _require_regular(path, mode)


def _raise(error: OSError) -> NoReturn:
    raise error

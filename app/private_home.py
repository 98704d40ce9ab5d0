"""Keep the home folder private: its database names PCs, and its logs quote training data.

Windows has no modes, and each user's folders are private there.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from app.errors import UserError
from app.paths import Paths, private_folder

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Folders that every new file system has, in case the home is a whole disk.
_NOBODYS = ("lost+found", "System Volume Information")


def make_private(paths: Paths) -> str:
    """Create the home if it is missing, else close it to other users.

    Returns:
        A notice for the user if the home was open to others, else an empty text.

    Raises:
        UserError: it belongs to another user, holds other files, or its disk has no modes.
        OSError: it cannot be created or changed.
    """
    home = private_folder(paths.home)
    if os.name != "posix":
        return ""
    if _is_open(home):
        _require_home(paths)
    was_open = _close(home)
    # The runs may be a link to a larger disk, which has to be private as well.
    if paths.runs.is_symlink() and paths.runs.is_dir():
        was_open |= _close(paths.runs)
    # Earlier versions left the files inside a closed home readable.
    if was_open or _is_open(paths.database):
        _close_all(home)
    if not was_open:
        return ""
    return f"Other users of this PC could read {home}, with its logs. Now only you can."


def _require_home(paths: Paths) -> None:
    """Refuse a folder that holds files of others.

    Raises:
        UserError: it holds files, but not those of Rackless.
        OSError: it cannot be read.
    """
    # Closing a folder such as `/srv` or `/etc` would lock out its users.
    names = [path.name for path in paths.home.iterdir()]
    is_ours = any(n.startswith("rackless.") or n == paths.nodes_file.name for n in names)
    others = [name for name in names if not name.startswith(".") and name not in _NOBODYS]
    if others and not is_ours:
        raise UserError(
            f"{paths.home} holds other files, such as {min(others)}, and other users can open it; "
            "as the home of Rackless it would be closed to them",
            "Set RACKLESS_HOME to a new folder, such as one inside it.",
        )


def _close(folder: Path) -> bool:
    """Close a folder; return whether it was open."""
    found = folder.stat()
    if sys.platform != "win32" and found.st_uid != os.geteuid():
        raise UserError(
            f"{folder} belongs to another user of this PC (number {found.st_uid}), who could read "
            "and change what Rackless keeps there",
            "Set RACKLESS_HOME to a folder of your own, or start Rackless as that user.",
        )
    if not found.st_mode & _OTHERS:
        return False
    folder.chmod(stat.S_IRWXU)
    if _is_open(folder):
        raise UserError(
            f"{folder} is on a disk that cannot keep other users out",
            "Set RACKLESS_HOME to a folder on a disk with permissions, such as one in your home.",
        )
    return True


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & _OTHERS)
    except FileNotFoundError:
        return False


def _close_all(home: Path) -> None:
    for top, folders, names in os.walk(home):
        for name in (*folders, *names):
            path = Path(top, name)
            found = path.lstat()
            # chmod follows links, so a link could change a file outside of the home.
            if found.st_mode & _OTHERS and not stat.S_ISLNK(found.st_mode):
                path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)

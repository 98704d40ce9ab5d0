"""Keep the home folder to its owner: its database names PCs, its logs quote training data.

Windows gives every user's folders to that user alone, and has no modes.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from app.errors import UserError
from app.paths import Paths, private_folder

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# A disk of its own has the latter from the start.
_NOBODYS = ("lost+found", "System Volume Information")


def make_private(paths: Paths) -> str:
    """Create the home if it is missing, else close it to other users.

    Returns:
        What to tell the user: the home was open until now; empty: nothing.

    Raises:
        UserError: it belongs to another user, is a folder for something else, or its disk knows no
            modes.
        OSError: it cannot be created or changed.
    """
    home = private_folder(paths.home)
    if os.name != "posix":
        return ""
    if _is_open(home):
        _require_home(paths)
    was_open = _close(home)
    # A link to a larger disk; what lies there is just as private.
    if paths.runs.is_symlink() and paths.runs.is_dir():
        was_open |= _close(paths.runs)
    # Earlier versions left the files within a closed home readable.
    if was_open or _is_open(paths.database):
        _close_all(home)
    if not was_open:
        return ""
    return f"Other users of this PC could read {home}, with its logs. Now only you can."


def _require_home(paths: Paths) -> None:
    """Refuse a folder with other things in it: closing `/srv` or `/etc` would lock its users out.

    Raises:
        UserError: nothing in it is ours.
        OSError: it cannot be read.
    """
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
            if found.st_mode & _OTHERS and not stat.S_ISLNK(found.st_mode):
                path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)

"""Full disks: whether space or inodes are used up, what to free, and no half-written files left."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_FEW_INODES = 16
"""Number of free inodes below which a disk counts as out of inodes."""


def lacks_inodes(place: Path) -> bool:
    """Return whether the disk of a path has space, but no inodes for more files."""
    path = place.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if sys.platform != "win32":  # which has no inodes
        with contextlib.suppress(OSError):
            state = os.statvfs(path)
            return bool(state.f_files) and state.f_favail < _FEW_INODES and state.f_bavail > 0
    return False


def describe_full(place: Path, where: str = "there") -> tuple[str, str]:
    """Return what the full disk of a path lacks, and what to free on it, as two sentences.

    Both begin with a capital letter and have no full stop; `where` ends the second one.
    """
    if lacks_inodes(place):
        return (
            "The disk takes no more files, since its inodes are used up",
            f"Delete files (df -i shows how many are left), not only large ones, {where}",
        )
    return "The disk is full", f"Free some space {where}"


def name_disk_error(error: OSError) -> str:
    """Return the reason why a file cannot be written, as a clause."""
    place = _find_place(error)
    if place is None:
        return error.strerror or str(error)
    lack = describe_full(place)[0]
    return lack[0].lower() + lack[1:]


def advise_room(error: OSError) -> str:
    """Return what to free on the disk after an error, as the beginning of a sentence."""
    return describe_full(_find_place(error) or Path(os.devnull), "on that disk")[1]


def _find_place(error: OSError) -> Path | None:
    """Return the path of an operation that lacked inodes; a write needs none and names none."""
    if error.errno != errno.ENOSPC or not isinstance(error.filename, str):
        return None
    place = Path(error.filename)
    return place if lacks_inodes(place) else None


@contextlib.contextmanager
def removing_half(path: Path) -> Iterator[Path]:
    """Yield the path of a file that the block writes and renames; remove it if the block fails.

    A half-written file would take room on a disk that is full already.
    """
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise

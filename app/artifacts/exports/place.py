"""Claim the folder on this PC that an export writes, before any node works.

It has to be new or empty, writable, and on a disk with enough room.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage

from agents.shared.files.full_disk import name_disk_error
from app.artifacts.estimates.plan import ExportPlan
from app.errors import UserError
from app.filelock import read_holder, try_held
from app.paths import is_same_folder, private_folder, whole_path
from app.runs.services import Services
from app.text import show_bytes

_ANOTHER = "Name another folder."
_NEW = "Name a new or empty folder."


def expect_free(out: Path) -> Path:
    """Check that a path is free and writable, without creating it; return its absolute path.

    Raises:
        UserError: it is in use, or cannot be written.
    """
    try:
        out = whole_path(out)
    except OSError as error:
        raise UserError(f"{out} is not a usable path: {error.strerror}", _ANOTHER) from error
    try:
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out} is not empty", _NEW)
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is a file", _NEW)
        above = next((folder for folder in (out, *out.parents) if folder.exists()), None)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {name_disk_error(error)}", _ANOTHER) from error
    if above is None:  # on Windows, if a drive or another PC is not connected
        raise UserError(f"{out} cannot be written: {out.anchor} is not there", _ANOTHER)
    # The folder is replaced, and a process whose current folder is gone cannot start others.
    if is_same_folder(out, Path()):
        raise UserError(f"{out} is the current folder", "Name a new folder in it.")
    if not above.is_dir():
        raise UserError(f"{out} cannot be written: {above} is a file", _ANOTHER)
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{out} cannot be written: {above} is read-only", _ANOTHER)
    return out


def free_place(out: Path) -> Path:
    """Return the absolute path for a new folder; an empty folder there is removed.

    Raises:
        UserError: it is in use, or cannot be written.
    """
    out = expect_free(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # With the name of the folder during its transfer, to detect a name that is too long.
        with tempfile.NamedTemporaryFile(
            prefix=f".{out.name}.", suffix=".part", dir=out.parent
        ) as probe:
            probe.write(b"\0")
        if out.is_dir():
            out.rmdir()
    except OSError as error:
        raise UserError(f"{out} cannot be written: {name_disk_error(error)}", _ANOTHER) from error
    return out


def expect_room(plan: ExportPlan, out: Path) -> None:
    """Check that the disk of `out` has room for the result, if its size is known.

    Raises:
        UserError: the disk has not enough room.
    """
    free_bytes = disk_usage(out.parent).free
    if plan.made is not None and plan.made.final_bytes > free_bytes:
        raise UserError(
            f"{out} needs {show_bytes(plan.made.final_bytes)}, and {show_bytes(free_bytes)} are "
            "free on that disk",
            f"Free some room there. {_ANOTHER}",
        )


@contextmanager
def claim_place(services: Services, out: Path) -> Iterator[None]:
    """Keep other exports of this master from writing to `out` until the block ends.

    Raises:
        UserError: another export is writing there.
    """
    # Without it, a second export would find the folder taken after all its work, and lose that.
    folder = private_folder(services.paths.home / "exports")
    place = os.path.normcase(os.path.realpath(out))  # a folder above may be a link
    path = folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.lock"
    handle = try_held(path)
    if handle is None:
        by = read_holder(path) or "another process"
        raise UserError(f"another export is writing to {out}, by {by}", _ANOTHER)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file
            path.unlink()
        os.close(handle)

"""Claims on a run that this PC is exporting, so that it is not deleted meanwhile.

A claim is a file lock, so a killed export leaves no claim behind. An export and a deletion each set
their own lock first and then check the other's, so that at most one of them continues.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import UserError
from app.filelock import LockHolder, is_held, read_holder, refuse_held, try_held, try_locked
from app.paths import private_folder
from app.runs.services import Services

_ID_BYTES = 4


@contextmanager
def claim_deletion(services: Services, run_id: str) -> Iterator[None]:
    """Keep exports of the run from starting inside the block.

    Raises:
        UserError: this PC is exporting or deleting it.
    """
    path = private_folder(_names(services, run_id)) / "deletion"
    handle = try_held(path)
    if handle is None:
        raise refuse_held(path)
    try:
        if exports := list_exports(services, run_id):
            raise UserError(
                f"an export of run {run_id} is under way, by {exports[0]}",
                "Wait until it ends, or cancel it.",
            )
        yield
    finally:
        os.close(handle)


@contextmanager
def claim_export(services: Services, run_id: str) -> Iterator[None]:
    """Keep the run from being deleted inside the block.

    Raises:
        UserError: it is being deleted, or there is no such run.
    """
    services.runs.get(run_id)
    folder = private_folder(_names(services, run_id))
    path = folder / f"export-{os.getpid()}-{secrets.token_hex(_ID_BYTES)}.lock"
    handle = try_held(path)
    try:
        deletion = folder / "deletion"
        if is_held(deletion):
            raise UserError(
                f"run {run_id} is being deleted by {read_holder(deletion) or 'another process'}"
            )
        services.runs.get(run_id)  # again: it may have been deleted before the lock
        yield
    finally:
        if handle is not None:
            os.close(handle)
        path.unlink(missing_ok=True)


def list_exports(services: Services, run_id: str) -> list[LockHolder]:
    """Return the processes of this PC that export a run."""
    found = []
    for path in _names(services, run_id).glob("export-*.lock"):
        if is_held(path):
            unknown = LockHolder(pid=0, command="another process", since_s=0.0)
            found.append(read_holder(path) or unknown)
    return found


def _names(services: Services, run_id: str) -> Path:
    """Return the folder with one lock file for each folder name that exports used on a node."""
    return services.paths.run(run_id) / "exports"


@contextmanager
def claim_name(services: Services, run_id: str, stem: str) -> Iterator[str]:
    """Yield a folder name for the node that no other export uses until the block ends.

    The name ends with a random id, so that it differs from those of other masters. A free name is
    reused, so that the node finds and removes the leftovers of a killed export.
    """
    folder = private_folder(_names(services, run_id))
    known = sorted(folder.glob(f"{stem}-{'?' * 2 * _ID_BYTES}.lock"))
    # Known names first, so that leftovers on the node are found; the random one is the last.
    for path in (*known, folder / f"{stem}-{secrets.token_hex(_ID_BYTES)}.lock"):
        handle = try_locked(path)
        if handle is not None:
            try:
                yield path.stem
            finally:
                os.close(handle)
            return
    raise UserError(f"{folder} is in use by other exports", "Export again.")

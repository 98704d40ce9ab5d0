"""Claims on a run that is being exported from this PC, so that nothing deletes it meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import UserError
from app.filelock import try_locked
from app.paths import private_folder
from app.runs.services import Services

_ID_BYTES = 4


def refuse_exported(services: Services, run_id: str) -> None:
    """Expect no export of a run to be under way from this PC.

    Raises:
        UserError: one is.
    """
    for path in _names(services, run_id).glob("*.lock"):
        handle = try_locked(path)
        if handle is None:
            raise UserError(
                f"an export of run {run_id} is under way", "Wait for its end, or cancel it."
            )
        os.close(handle)


def _names(services: Services, run_id: str) -> Path:
    """Return the folder with a lock file for each name that an export has or had on a node."""
    return services.paths.run(run_id) / "exports"


@contextmanager
def claim_name(services: Services, run_id: str, stem: str) -> Iterator[str]:
    """Give the name of a folder on the node that no other export uses until the block ends.

    It ends with a random id, that of another master differs. One that is free is taken again, so
    that the node finds by it what an export that was killed has left, and clears that away.
    """
    folder = private_folder(_names(services, run_id))
    known = sorted(folder.glob(f"{stem}-{'?' * 2 * _ID_BYTES}.lock"))
    for path in (*known, folder / f"{stem}-{secrets.token_hex(_ID_BYTES)}.lock"):
        handle = try_locked(path)
        if handle is not None:
            try:
                yield path.stem
            finally:
                os.close(handle)
            return
    raise UserError(f"{folder} is in use by other exports", "Export again.")

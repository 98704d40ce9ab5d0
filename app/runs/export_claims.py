"""Claims on a run that this PC is exporting, so that it is not deleted meanwhile.

A claim is a file lock, so a killed export leaves no claim behind.
"""

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
    """Check that this PC is not exporting a run.

    Raises:
        UserError: it is.
    """
    for path in _names(services, run_id).glob("*.lock"):
        handle = try_locked(path)
        if handle is None:
            raise UserError(
                f"an export of run {run_id} is under way", "Wait until it ends, or cancel it."
            )
        os.close(handle)


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

"""The newest attempt of a run that this node knows: an older one may not start or commit any more.

The trainer reads the same file right before it commits a checkpoint.
"""

from __future__ import annotations

import contextlib

from agents.contract.run_layout import FENCE
from agents.errors import explain_os_error
from agents.state import Home, locked, write_bytes


def read_fence(home: Home, run_id: str) -> int:
    """Return the newest attempt number, 0 when there was none yet."""
    with contextlib.suppress(OSError, ValueError):
        return int((home.run(run_id) / FENCE).read_text(encoding="ascii"))
    return 0


def raise_fence(home: Home, run_id: str, attempt: int) -> int:
    """Make `attempt` the newest unless a newer one is known; return the newest.

    Raises:
        ExpectedError: the file cannot be written.
    """
    run = home.run(run_id)
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making the folder {run}") from error
    # Two servers may raise it at once, and the lower number must not win.
    with locked(run / "fence.lock", 10.0, f"The fence of run {run_id} is being written."):
        newest = read_fence(home, run_id)
        if attempt > newest:
            write_bytes(run / FENCE, f"{attempt}\n".encode("ascii"))
        return max(newest, attempt)

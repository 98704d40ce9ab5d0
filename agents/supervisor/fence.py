"""The newest attempt of a run that this node knows: an older one may not start or commit any more.

The trainer reads the same file right before it commits a checkpoint. A claim is a stricter form,
for a recovery that no person asked for: each number is granted to one claimer alone, and to none
once an attempt is there that the claimer does not know. So if two claimers each get a majority of
a run's nodes, one node has granted both, and that node refuses to launch the older one.
"""

from __future__ import annotations

import contextlib

from agents.contract.run import Claim
from agents.contract.run_layout import ATTEMPTS, FENCE, INTENT_FILE, attempt_of_folder
from agents.errors import explain_os_error
from agents.state import Home, locked, write_bytes

CLAIM_TIMEOUT_S = 10.0
"""Wait for a launch of the same run, in seconds."""


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


def find_newest_launched(home: Home, run_id: str) -> int:
    """Return the newest attempt with an intent on this node; 0: none."""
    folders = (path.parent.name for path in home.run(run_id).glob(f"{ATTEMPTS}/*/{INTENT_FILE}"))
    return max((attempt_of_folder(name) or 0 for name in folders), default=0)


def claim_attempt(home: Home, run_id: str, attempt: int, replaces: int) -> Claim:
    """Grant an attempt number that nobody got yet, unless one after `replaces` was launched here.

    Raises:
        ExpectedError: the fence cannot be written, or the run is being launched.
    """
    run = home.run(run_id)
    busy = f"Run {run_id} is being launched."
    if not run.is_dir():
        return Claim(is_granted=False, fence=0)
    # Not between the check of a launch and its intent.
    with locked(run / "launch.lock", CLAIM_TIMEOUT_S, busy):
        launched, fence = find_newest_launched(home, run_id), read_fence(home, run_id)
        if launched > replaces or attempt <= fence:
            return Claim(is_granted=False, fence=fence, launched=launched)
        newest = raise_fence(home, run_id, attempt)
        return Claim(is_granted=newest == attempt, fence=newest, launched=launched)

"""The fence of a run: the newest attempt known to this node; older ones may not start or commit.

The trainer reads the same file right before it commits a checkpoint. A claim is stricter, for an
automatic recovery: each number is granted to one claimant only, and not at all if this node has
launched an attempt that the claimant does not know. If two claimants each get a majority of the
run's nodes, at least one node has granted both, and it refuses to launch the older attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from agents.contract.election import is_majority
from agents.contract.mandate import prove
from agents.contract.run import AttemptIntent, Claim
from agents.contract.run_layout import (
    ATTEMPTS,
    FENCE,
    HALT,
    INTENT_FILE,
    MASTER_KEYS,
    attempt_of_folder,
)
from agents.contract.wire import WireError, from_wire
from agents.errors import explain_os_error
from agents.state import Home, locked, read_json, write_bytes, write_json

CLAIM_TIMEOUT_S = 10.0
"""Maximum wait for a launch of the same run, in seconds."""


def read_fence(home: Home, run_id: str) -> int:
    """Return the newest attempt number, or 0 before the first attempt."""
    return _read_number(home, run_id, FENCE)


def read_halt(home: Home, run_id: str) -> int:
    """Return the newest attempt that a stop by the user forbids to start, or 0."""
    return _read_number(home, run_id, HALT)


def _read_number(home: Home, run_id: str, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((home.run(run_id) / name).read_text(encoding="ascii"))
    return 0


def raise_fence(home: Home, run_id: str, attempt: int) -> int:
    """Raise the fence to `attempt` unless it is higher already; return the fence.

    Raises:
        ExpectedError: the file cannot be written.
    """
    run = home.run(run_id)
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making the folder {run}") from error
    # Without the lock, two servers could raise it at the same time and the lower number could win.
    with locked(run / "fence.lock", 10.0, f"The fence of run {run_id} is being written."):
        newest = read_fence(home, run_id)
        if attempt > newest:
            write_bytes(run / FENCE, f"{attempt}\n".encode("ascii"))
        return max(newest, attempt)


def add_master_key(home: Home, run_id: str, key: str) -> None:
    """Remember the key of a master that launches an attempt of the run here.

    Raises:
        ExpectedError: the file cannot be written.
    """
    keys = _read_master_keys(home, run_id)
    if key not in keys:
        write_json(home.run(run_id) / MASTER_KEYS, {"keys": [*keys, key]})


def _read_master_keys(home: Home, run_id: str) -> list[str]:
    keys = (read_json(home.run(run_id) / MASTER_KEYS) or {}).get("keys")
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


def find_newest_launched(home: Home, run_id: str) -> int:
    """Return the newest attempt with an intent on this node, or 0.

    An intent that neither a master of the run nor a majority of its nodes has signed was put there
    by other means, and does not count. Masters of earlier versions signed nothing.
    """
    keys = _read_master_keys(home, run_id)
    found = {
        attempt_of_folder(path.parent.name) or 0: path
        for path in home.run(run_id).glob(f"{ATTEMPTS}/*/{INTENT_FILE}")
    }
    for number in sorted(found, reverse=True):
        if not keys or _is_signed(run_id, number, found[number], keys):
            return number
    return 0


def _is_signed(run_id: str, number: int, path: Path, keys: Sequence[str]) -> bool:
    try:
        intent = from_wire(AttemptIntent, read_json(path))
    except WireError:
        return False
    if intent.proof is None or intent.proof.mandate.key not in keys:
        return False
    proved = prove(intent.proof, is_majority)
    return proved is not None and proved.mandate.run_id == run_id and proved.attempt == number


def claim_attempt(home: Home, run_id: str, attempt: int, replaces: int) -> Claim:
    """Grant an attempt number unless it was granted before, an attempt after `replaces` started, or
    the user stopped the attempt `replaces`.

    Raises:
        ExpectedError: the fence cannot be written, or the run is being launched.
    """
    run = home.run(run_id)
    busy = f"Run {run_id} is being launched."
    if not run.is_dir():  # the run was deleted, or was never here
        return Claim(is_granted=False, fence=0)
    # A launch checks the fence and then writes its intent; a claim must not come in between.
    with locked(run / "launch.lock", CLAIM_TIMEOUT_S, busy):
        launched, fence = find_newest_launched(home, run_id), read_fence(home, run_id)
        is_halted = read_halt(home, run_id) >= max(replaces, 1)
        if launched > replaces or attempt <= fence or is_halted:
            return Claim(is_granted=False, fence=fence, launched=launched)
        newest = raise_fence(home, run_id, attempt)
        return Claim(is_granted=newest == attempt, fence=newest, launched=launched)

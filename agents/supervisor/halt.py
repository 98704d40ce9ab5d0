"""Halt a run on this node: none of its attempts that are known or announced may start any more.

A master that stops a run cannot end a launch whose process is suspended, or whose request is still
on its way. So the node itself refuses these attempts, as well as their recovery by the nodes. A
resume by the user takes a higher number, which the fence tells it.
"""

from __future__ import annotations

import contextlib

from agents.contract.run_layout import HALT
from agents.errors import ExpectedError
from agents.state import Home, locked, write_bytes
from agents.supervisor.fence import find_newest_launched, read_fence, read_halt

LAUNCH_WAIT_S = 8.0
"""Maximum wait for a launch that was accepted before the halt, in seconds."""


def halt_run(home: Home, run_id: str, attempt: int) -> int:
    """Refuse all attempts up to `attempt`, and up to the newest known one; return that number.

    On a full disk nothing is refused, since a launch cannot write its intent there either.

    Raises:
        ExpectedError: the fence is in use.
    """
    run = home.run(run_id)
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return attempt
    with locked(run / "fence.lock", 10.0, f"The fence of run {run_id} is being written."):
        newest = max(attempt, read_fence(home, run_id), find_newest_launched(home, run_id))
        if newest > read_halt(home, run_id):
            with contextlib.suppress(ExpectedError):
                write_bytes(run / HALT, f"{newest}\n".encode("ascii"))
    # A launch that passed its check before ends here, so that its processes are found and stopped.
    with contextlib.suppress(ExpectedError), locked(run / "launch.lock", LAUNCH_WAIT_S, "busy"):
        pass
    return newest

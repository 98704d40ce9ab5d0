"""Let the ranks of this node save their state, within a time limit, after another rank was lost.

A rank that detects the loss saves by itself. A rank that waits for a silent node in a collective
does not detect it. So all are asked by a file, and a thread in each rank saves and ends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from agents.contract.run_layout import LOSS_FILE
from agents.errors import ExpectedError
from agents.state import write_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.rank_group import RankGroup
from agents.supervisor.stalls import LOOP_PHASES

LOSS_GRACE_S = 20.0
"""Maximum time for a rank to save, in seconds; afterwards it is ended."""
ANSWER_S = 2.0
"""Maximum time for a rank to begin to save, and to end after it, in seconds; a rank that hangs does
neither."""
_LOOK_S = 0.1


def let_save(group: RankGroup, attempt: AttemptFolder, is_over: Callable[[], bool]) -> None:
    """Wait until all ranks have ended, none is saving any more, or `is_over` returns True."""
    if not has_begun(group):
        return  # nothing to save yet
    with contextlib.suppress(ExpectedError):  # the disk is full: nothing can be saved either
        write_json(attempt.file(LOSS_FILE), {"requested_s": time.time()})
    began_s = saving_s = time.monotonic()
    while group.is_any_alive and not is_over():
        now_s = time.monotonic()
        if "saving" in _read_phases(group):
            saving_s = now_s
        if now_s - began_s >= LOSS_GRACE_S or now_s - saving_s >= ANSWER_S:
            return
        group.wait(_LOOK_S)


def has_begun(group: RankGroup) -> bool:
    """Return whether a living rank has reached the training loop, and thus has state to save."""
    return any(phase in LOOP_PHASES for phase in _read_phases(group))


def _read_phases(group: RankGroup) -> list[str]:
    living = (rank for rank in group.ranks if not rank.has_ended)
    return [str(rank.read_heartbeat().get("phase", "")) for rank in living]

"""Let the ranks of this node save what they hold when another rank was lost, within a bound.

A rank that notices the loss saves by itself. One that waits for a silent node in a collective
notices nothing, so all are asked by a file; a thread of each heeds it, saves, and ends the rank.
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
"""Time for a rank that saves, in seconds; then it is ended without."""
ANSWER_S = 2.0
"""Time for a rank to begin to save, and to end after that, in seconds; one that hangs does
neither."""
_LOOK_S = 0.1


def let_save(group: RankGroup, attempt: AttemptFolder, is_over: Callable[[], bool]) -> None:
    """Return once all ranks have ended, none is saving any more, or `is_over` says so.

    At once where none trains, since there is nothing to save.
    """
    if not has_begun(group):
        return
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
    """Return whether a living rank has got as far as the training, so that it holds a state."""
    return any(phase in LOOP_PHASES for phase in _read_phases(group))


def _read_phases(group: RankGroup) -> list[str]:
    living = (rank for rank in group.ranks if not rank.has_ended)
    return [str(rank.read_heartbeat().get("phase", "")) for rank in living]

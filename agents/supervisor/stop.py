"""End an attempt on this node so that none of its processes is left, even without a supervisor.

Normally the supervisor does it. If that was killed, hangs, or takes too long, the server itself
kills all tagged processes and writes the record of the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from agents.contract.run import AttemptStatus
from agents.contract.run_layout import EXIT_FILE, STOP_FILE
from agents.errors import ExpectedError
from agents.state import take_lock, write_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.election_process import close, end_election
from agents.supervisor.ownership import keep_owned
from agents.supervisor.sweep import (
    SETTLE_S,
    describe_unkillable,
    find_processes,
    send_signal,
    sweep,
)

SUPERVISOR_EXTRA_S = SETTLE_S + 10.0
"""Time of the supervisor beyond the grace of its ranks, for sweep and records, in seconds."""
MAX_GRACE_S = 3600.0


def stop(attempt: AttemptFolder, grace_s: float, *, at_loss: bool = False) -> AttemptStatus:
    """Ask the attempt to end, wait until no tagged process is left, and return its status.

    Args:
        attempt: on this node.
        grace_s: time for its ranks, in seconds.
        at_loss: whether ranks elsewhere were lost: then those here save what they hold, without
            them, while no person asks for a stop as well.

    Raises:
        ExpectedError: there is no such attempt here, or a process cannot be killed.
    """
    attempt.require()
    # First, so that the other nodes do not take a part that was stopped for one that was lost. With
    # `at_loss` it was, and they go on without the master should that vanish before it resumes.
    if not at_loss:
        with contextlib.suppress(ExpectedError):  # a full disk
            close(attempt, "it was stopped")
    grace_s = min(max(0.0, grace_s), MAX_GRACE_S)
    if grace_s > 0:
        # Ranks whose supervisor was killed get another one, which lets them save.
        with contextlib.suppress(ExpectedError):
            keep_owned(attempt)
    # The supervisor carries the tag as well, so without processes nobody is left to ask.
    if find_processes(attempt.tag):
        _ask(attempt, grace_s, at_loss=at_loss)
        _wait_for_supervisor(attempt, grace_s + SUPERVISOR_EXTRA_S)
        # After a recorded end only leftovers remain, which have no step to finish.
        left = sweep(attempt.tag, min(grace_s, 5.0) if _is_recorded(attempt) else grace_s)
        if left:
            node = read_status(attempt).node
            raise ExpectedError(describe_unkillable(left, node), "Restart that PC")
    if not at_loss:
        end_election(attempt)
    if not _is_recorded(attempt):
        _record(attempt)
    return read_status(attempt)


def _ask(attempt: AttemptFolder, grace_s: float, *, at_loss: bool) -> None:
    request = {"grace_s": grace_s, "requested_s": time.time(), "at_loss": at_loss}
    # What a person asks for is not softened by a master that cleans up.
    if not (at_loss and attempt.file(STOP_FILE).exists()):
        with contextlib.suppress(ExpectedError):  # on a full disk the signal alone has to do
            write_json(attempt.file(STOP_FILE), request)
    supervisor = attempt.read_supervisor()
    if supervisor is not None and supervisor.is_alive():
        # Only wakes it up at once; it would find the file at its next tick.
        send_signal(attempt.tag, supervisor.pid, signal.SIGINT)
        send_signal(attempt.tag, supervisor.pid, signal.SIGCONT)  # it may have been stopped


def _wait_for_supervisor(attempt: AttemptFolder, patience_s: float) -> None:
    """Wait until it is gone or its patience is over."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        supervisor = attempt.read_supervisor()
        if supervisor is not None and not supervisor.is_alive():
            return
        # started.json may come at any moment as long as a tagged process lives.
        if supervisor is None and not find_processes(attempt.tag):
            return
        time.sleep(0.05)


def _is_recorded(attempt: AttemptFolder) -> bool:
    return attempt.file(EXIT_FILE).exists()


def _record(attempt: AttemptFolder) -> None:
    """Write the end of an attempt whose supervisor could not, unless one is writing it now."""
    lock = os.open(attempt.file("supervisor.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not take_lock(lock, 1.0) or _is_recorded(attempt):
            return
        message = "Its supervisor was gone; what was left of it was ended."
        value = {"state": "stopped", "message": message, "hint": "", "ended_s": time.time()}
        write_json(attempt.file(EXIT_FILE), value)
    finally:
        os.close(lock)

"""End all processes of an attempt on this node, even without a supervisor.

Normally the supervisor ends them. If it was killed, hangs, or takes too long, the server itself
kills all tagged processes and writes the record of the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from agents.contract.election import Closing
from agents.contract.run import AttemptStatus
from agents.contract.run_layout import EXIT_FILE, STOP_FILE
from agents.errors import ExpectedError
from agents.state import take_lock, write_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.election_process import close, end_election
from agents.supervisor.ownership import keep_owned
from agents.supervisor.sweep import (
    LEFT_SETTLE_S,
    SETTLE_S,
    describe_unkillable,
    find_processes,
    send_signal,
    sweep,
)

SUPERVISOR_EXTRA_S = SETTLE_S + 10.0
"""Time for the supervisor after the grace of its ranks, for sweep and records, in seconds."""
MAX_GRACE_S = 3600.0


def stop(
    attempt: AttemptFolder, grace_s: float, *, at_loss: bool = False, closing: str = ""
) -> AttemptStatus:
    """Ask the attempt to end, wait until no tagged process is left, and return its status.

    Args:
        attempt: attempt on this node.
        grace_s: time for its ranks to end, in seconds.
        at_loss: True if ranks on other nodes were lost. Then the ranks here save their state
            without them, unless the user asks for a stop as well.
        closing: the master's signature of `closing_bytes`, by which other nodes respect the stop.

    Raises:
        ExpectedError: this node has no such attempt, or a process cannot be killed.
    """
    attempt.require()
    # First, so that other nodes do not mistake a stopped part for a lost one. With `at_loss` it is
    # a loss: if the master vanishes before it resumes the run, the nodes recover it.
    if not at_loss:
        with contextlib.suppress(ExpectedError):  # a full disk
            close(attempt, "it was stopped", Closing(signature=closing))
    grace_s = min(max(0.0, grace_s), MAX_GRACE_S)
    if grace_s > 0:
        # Ranks whose supervisor was killed get another, which lets them save.
        with contextlib.suppress(ExpectedError):
            keep_owned(attempt)
    # The supervisor has the tag as well, so without processes there is no one to ask.
    if find_processes(attempt.tag):
        _ask(attempt, grace_s, at_loss=at_loss)
        _wait_for_supervisor(attempt, grace_s + SUPERVISOR_EXTRA_S)
        # After a recorded end, only leftover processes remain, which have no step to finish.
        if _is_recorded(attempt):
            left = sweep(attempt.tag, min(grace_s, 5.0), settle_s=LEFT_SETTLE_S)
        else:
            left = sweep(attempt.tag, grace_s)
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
    # A master that cleans up must not weaken a stop that the user asked for.
    if not (at_loss and attempt.file(STOP_FILE).exists()):
        with contextlib.suppress(ExpectedError):  # on a full disk, the signal alone must suffice
            write_json(attempt.file(STOP_FILE), request)
    supervisor = attempt.read_supervisor()
    if supervisor is not None and supervisor.is_alive():
        # Wakes it at once; otherwise it would find the file at its next tick.
        send_signal(attempt.tag, supervisor.pid, signal.SIGINT)
        send_signal(attempt.tag, supervisor.pid, signal.SIGCONT)  # it may have been stopped


def _wait_for_supervisor(attempt: AttemptFolder, patience_s: float) -> None:
    """Wait until the supervisor has ended, at most `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        supervisor = attempt.read_supervisor()
        if supervisor is not None and not supervisor.is_alive():
            return
        # While a tagged process lives, started.json may still appear.
        if supervisor is None and not find_processes(attempt.tag):
            return
        time.sleep(0.05)


def _is_recorded(attempt: AttemptFolder) -> bool:
    return attempt.file(EXIT_FILE).exists()


def _record(attempt: AttemptFolder) -> None:
    """Record the end of an attempt without a supervisor, unless one is recording it now."""
    lock = os.open(attempt.file("supervisor.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not take_lock(lock, 1.0) or _is_recorded(attempt):
            return
        message = "Its supervisor was gone; what was left of it was ended."
        value = {"state": "stopped", "message": message, "hint": "", "ended_s": time.time()}
        write_json(attempt.file(EXIT_FILE), value)
    finally:
        os.close(lock)

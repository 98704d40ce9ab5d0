"""Handlers of requests about attempts: launch, status, list, stop, control request."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

from agents.contract.election import Closing
from agents.contract.messages import MAX_LINE_BYTES
from agents.contract.requests.attempts import (
    Attempts,
    ConfirmAttempt,
    ControlAttempt,
    KeepAttempt,
    LaunchAttempt,
    ListAttempts,
    OwnAttempt,
    ReadAttempt,
    StopAttempt,
)
from agents.contract.run import AttemptStatus
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.supervisor.attempt import (
    AttemptFolder,
    find_attempts,
    is_over,
    read_status,
    write_owner,
)
from agents.supervisor.confirmation import confirm as confirm_attempt
from agents.supervisor.control_requests import write_request
from agents.supervisor.election_process import close
from agents.supervisor.election_process import keep as record_keep
from agents.supervisor.launch import launch as launch_attempt
from agents.supervisor.ownership import end_strays, keep_all_owned, keep_owned
from agents.supervisor.proof import require_proved
from agents.supervisor.stop import stop as stop_attempt
from agents.supervisor.sweep import read_tagged

# Room for the envelope of the response.
MAX_LIST_BYTES = MAX_LINE_BYTES - 4096


@handles(LaunchAttempt)
def launch(call: Call, request: LaunchAttempt) -> AttemptStatus:
    """Start this node's part of an attempt, once."""
    require_proved(request.intent)
    return launch_attempt(call.home, request.intent)


@handles(ConfirmAttempt)
def confirm(call: Call, request: ConfirmAttempt) -> None:
    """Confirm this node's part of an attempt, temporarily or finally."""
    confirm_attempt(AttemptFolder(call.home, request.run_id, request.attempt), request.is_final)


@handles(OwnAttempt)
def own(call: Call, request: OwnAttempt) -> None:
    """Record the master that takes over an attempt."""
    write_owner(AttemptFolder(call.home, request.run_id, request.attempt), request.master)


@handles(KeepAttempt)
def keep(call: Call, request: KeepAttempt) -> None:
    """Reserve the attempt for the master, or close it, so that no node recovers it."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    if request.is_closed:
        close(attempt, "a master said so", Closing(signature=request.closing))
    else:
        record_keep(attempt)


@handles(ReadAttempt)
def status(call: Call, request: ReadAttempt) -> AttemptStatus:
    """Return the status of an attempt on this node."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    with contextlib.suppress(ExpectedError):  # the status can be read even if this fails
        keep_owned(attempt)
    return read_status(attempt)


@handles(ListAttempts)
def list_all(call: Call, request: ListAttempts) -> Attempts:
    """Return the attempts that this node knows, without the oldest if they exceed a response.

    Only the newest attempt of each run carries its spec and all its ranks, and only that one and
    those with processes their proof.
    """
    keep_all_owned(call.home)
    # Once for all attempts, since each scan reads the environment of every process.
    tagged = list(read_tagged())
    # Processes that no attempt owns any more would hold their GPUs for good.
    end_strays(call.home, tagged)
    attempts = find_attempts(call.home)
    newest = {attempt.run_id: attempt.number for attempt in attempts}
    statuses = [read_status(attempt, tagged) for attempt in attempts]
    shown = [s if newest[s.run_id] == s.attempt else _shorten(s) for s in statuses]
    return Attempts(attempts=_fit(shown))


def _shorten(status: AttemptStatus) -> AttemptStatus:
    is_over = status.state not in ("starting", "running", "stopping") and not status.num_processes
    return replace(status, spec=None, all_ranks=(), proof=None if is_over else status.proof)


def _fit(statuses: list[AttemptStatus]) -> tuple[AttemptStatus, ...]:
    """Return the statuses, without the oldest if they are too many for one message."""
    left_bytes = MAX_LIST_BYTES
    kept = []
    # Space is given to the newest first; the answer keeps the original order.
    for index in sorted(range(len(statuses)), key=lambda i: -(statuses[i].started_s or 0.0)):
        left_bytes -= len(json.dumps(to_wire(statuses[index])))
        if left_bytes < 0:
            break
        kept.append(index)
    return tuple(statuses[index] for index in sorted(kept))


@handles(StopAttempt)
def stop(call: Call, request: StopAttempt) -> AttemptStatus:
    """End an attempt on this node; answer after the last tagged process is gone."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    return stop_attempt(attempt, request.grace_s, at_loss=request.at_loss, closing=request.closing)


@handles(ControlAttempt)
def wish(call: Call, request: ControlAttempt) -> None:
    """Write a control request for the trainer, which checks for one at each step."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    attempt.require()
    # No rank would read the request, and the user would wait for its effect.
    if is_over(attempt):
        raise ExpectedError(
            f"Attempt {request.attempt} of run {request.run_id} has ended on this node."
        )
    write_request(attempt.folder, request.wish)

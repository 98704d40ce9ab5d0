"""Handle requests about attempts: launch, status, list, stop, control request."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

from agents.contract.messages import MAX_LINE_BYTES
from agents.contract.names import MAX_WAIT_S, check_number
from agents.contract.run import AttemptIntent, AttemptStatus, ControlRequest, MasterIdentity
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.serve.channel import Call
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
from agents.supervisor.stop import stop as stop_attempt
from agents.supervisor.sweep import read_tagged

MAX_LIST_BYTES = MAX_LINE_BYTES - 4096


@dataclass(frozen=True)
class AttemptArgs:
    run_id: str
    attempt: int


@dataclass(frozen=True)
class ConfirmArgs:
    run_id: str
    attempt: int
    is_final: bool


@dataclass(frozen=True)
class OwnArgs:
    run_id: str
    attempt: int
    master: MasterIdentity


@dataclass(frozen=True)
class KeepArgs:
    run_id: str
    attempt: int
    is_closed: bool


@dataclass(frozen=True)
class StopArgs:
    run_id: str
    attempt: int
    grace_s: float = 30.0
    at_loss: bool = False

    def check_foreign(self) -> None:
        check_number("grace_s", self.grace_s, 0, MAX_WAIT_S)


@dataclass(frozen=True)
class WishArgs:
    run_id: str
    attempt: int
    wish: ControlRequest


def launch(call: Call) -> AttemptStatus:
    """Start this node's part of an attempt, once."""
    return launch_attempt(call.home, from_wire(AttemptIntent, call.args, "intent"))


def confirm(call: Call) -> dict[str, Any]:
    """Let this node's part of an attempt go on: for a moment, or for good."""
    args = from_wire(ConfirmArgs, call.args, "args")
    confirm_attempt(AttemptFolder(call.home, args.run_id, args.attempt), args.is_final)
    return {}


def own(call: Call) -> dict[str, Any]:
    """Remember the master that takes an attempt over."""
    args = from_wire(OwnArgs, call.args, "args")
    write_owner(AttemptFolder(call.home, args.run_id, args.attempt), args.master)
    return {}


def keep(call: Call) -> dict[str, Any]:
    """Leave the attempt to the master that asks, or close it, so that no node recovers it."""
    args = from_wire(KeepArgs, call.args, "args")
    attempt = AttemptFolder(call.home, args.run_id, args.attempt)
    if args.is_closed:
        close(attempt, "a master said so")
    else:
        record_keep(attempt)
    return {}


def status(call: Call) -> AttemptStatus:
    """Return the status of an attempt on this node."""
    args = from_wire(AttemptArgs, call.args, "args")
    attempt = AttemptFolder(call.home, args.run_id, args.attempt)
    with contextlib.suppress(ExpectedError):  # the state can be read all the same
        keep_owned(attempt)
    return read_status(attempt)


def list_all(call: Call) -> dict[str, Any]:
    """Return the attempts that this node knows, as many of the newest as fit into an answer.

    Only the newest attempt of each run carries its spec and all its ranks.
    """
    keep_all_owned(call.home)
    # Once for all attempts: each scan reads the environment of every process.
    tagged = list(read_tagged())
    end_strays(call.home, tagged)
    attempts = find_attempts(call.home)
    newest = {attempt.run_id: attempt.number for attempt in attempts}
    statuses = [read_status(attempt, tagged) for attempt in attempts]
    told = [s if newest[s.run_id] == s.attempt else _shorten(s) for s in statuses]
    return {"attempts": _fit(told)}


def _shorten(status: AttemptStatus) -> AttemptStatus:
    return replace(status, spec=None, all_ranks=())


def _fit(statuses: list[AttemptStatus]) -> list[dict[str, Any]]:
    """Return the wire forms, leaving out the oldest when they are too many for one message."""
    left_bytes = MAX_LIST_BYTES
    kept = {}
    # The newest take the space first; the answer keeps the original order.
    for index in sorted(range(len(statuses)), key=lambda i: -(statuses[i].started_s or 0.0)):
        form = to_wire(statuses[index])
        left_bytes -= len(json.dumps(form))
        if left_bytes < 0:
            break
        kept[index] = form
    return [kept[index] for index in sorted(kept)]


def stop(call: Call) -> AttemptStatus:
    """End an attempt here; answer once no tagged process is left."""
    args = from_wire(StopArgs, call.args, "args")
    attempt = AttemptFolder(call.home, args.run_id, args.attempt)
    return stop_attempt(attempt, args.grace_s, at_loss=args.at_loss)


def wish(call: Call) -> dict[str, Any]:
    """Write a control request for the trainer, which checks for one at each step."""
    args = from_wire(WishArgs, call.args, "args")
    attempt = AttemptFolder(call.home, args.run_id, args.attempt)
    attempt.require()
    # Nobody would take the request, and the user would wait for its effect.
    if is_over(attempt):
        raise ExpectedError(f"Attempt {args.attempt} of run {args.run_id} has ended on this node.")
    write_request(attempt.folder, args.wish)
    return {}

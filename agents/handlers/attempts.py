"""Requests about attempts: launch, status, list, stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents.channel import Call
from agents.protocol import AttemptIntent, AttemptStatus
from agents.supervisor.attempt import Attempt, find_attempts, read_status
from agents.supervisor.launch import launch as launch_attempt
from agents.supervisor.stop import stop as stop_attempt
from agents.wire import from_wire


@dataclass(frozen=True)
class AttemptArgs:
    run_id: str
    attempt: int


@dataclass(frozen=True)
class StopArgs:
    run_id: str
    attempt: int
    grace_s: float = 30.0


def launch(call: Call) -> AttemptStatus:
    """Start this node's part of an attempt, once."""
    return launch_attempt(call.home, from_wire(AttemptIntent, call.args, "intent"))


def status(call: Call) -> AttemptStatus:
    """Return how an attempt stands here."""
    args = from_wire(AttemptArgs, call.args, "args")
    return read_status(Attempt(call.home, args.run_id, args.attempt))


def list_all(call: Call) -> dict[str, Any]:
    """Return every attempt that this node knows."""
    return {"attempts": [read_status(attempt) for attempt in find_attempts(call.home)]}


def stop(call: Call) -> AttemptStatus:
    """End an attempt here; answer once no tagged process is left."""
    args = from_wire(StopArgs, call.args, "args")
    return stop_attempt(Attempt(call.home, args.run_id, args.attempt), args.grace_s)

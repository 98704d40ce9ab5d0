"""Requests about the attempts of runs."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.names import MAX_WAIT_S, check_number
from agents.contract.requests import NodeRequest
from agents.contract.run import AttemptIntent, AttemptStatus, ControlRequest, MasterIdentity

STOP_MARGIN_S = 60.0
"""Time to kill and sweep processes after the grace period of a stop, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchAttempt(NodeRequest[AttemptStatus]):
    """Start the node's part of an attempt, once."""

    kind = "attempt.launch"
    flat = "intent"
    limit_s = 120.0
    echoes = ("run_id", "attempt")
    intent: AttemptIntent


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfirmAttempt(NodeRequest[None]):
    """Confirm the node's part of an attempt, temporarily or finally."""

    kind = "attempt.confirm"
    run_id: str
    attempt: int
    is_final: bool
    """True if all parts run; False if others are still being launched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAttempt(NodeRequest[None]):
    """Record the master that takes over an attempt."""

    kind = "attempt.own"
    run_id: str
    attempt: int
    master: MasterIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAttempt(NodeRequest[None]):
    """Reserve the recovery of an attempt for this master for a while, or end recovery for good."""

    kind = "attempt.keep"
    run_id: str
    attempt: int
    is_closed: bool
    """True if the attempt is closed, so that its nodes no longer recover it."""
    closing: str = ""
    """Signature of `closing_bytes` by which the other nodes know it; empty: a master of an earlier
    version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAttempt(NodeRequest[AttemptStatus]):
    """Read the status of an attempt on the node."""

    kind = "attempt.status"
    echoes = ("run_id", "attempt")
    run_id: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """Attempts of a node; only the newest attempt of each run has its spec and all ranks."""

    attempts: tuple[AttemptStatus, ...]
    """Attempts by run and number; the oldest are omitted if they exceed a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListAttempts(NodeRequest[Attempts]):
    """List the attempts that the node knows."""

    kind = "attempt.list"


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAttempt(NodeRequest[AttemptStatus]):
    """End the node's part of an attempt; the answer comes once all of its processes are gone."""

    kind = "attempt.stop"
    echoes = ("run_id", "attempt")
    run_id: str
    attempt: int
    grace_s: float = 30.0
    """Time for the ranks to save and exit by themselves, in seconds."""
    at_loss: bool = False
    """True if another node was lost, so that the ranks save by themselves."""
    closing: str = ""
    """Signature of `closing_bytes`, by which nodes that miss the stop respect it later; empty: a
    master of an earlier version."""

    def check_foreign(self) -> None:
        check_number("grace_s", self.grace_s, 0, MAX_WAIT_S)

    def deadline_s(self) -> float | None:
        # The node answers after its processes are gone, so the deadline includes their grace.
        return self.grace_s + STOP_MARGIN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlAttempt(NodeRequest[None]):
    """Send a control request to the node of rank 0, whose journal reports the outcome."""

    # Old nodes know control requests as wishes, so the names on the wire stay.
    kind = "attempt.wish"
    run_id: str
    attempt: int
    wish: ControlRequest

"""The states of a run, the legal moves between them, and the verdict over what its nodes report.

Pure: no clock, no network. A verdict is always about one attempt. Its rules, in this order:

1. A node that is silent says nothing by itself: training does not need the master. It is given up
   only when the others report that they lost a peer, or stand still, for `lost_after_s`.
2. The culprit is what broke first: a lost or silent node before a rank that failed, a rank that
   failed on its own before ranks that merely lost their peers.
3. While only ranks that lost their peers have failed, the culprit is still to come.
4. Once there is a culprit, every part that is still active has to be stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.run import AttemptStatus
from app.events import RunState
from app.text import show_list

_ENDS: frozenset[RunState] = frozenset({"stopped", "interrupted", "failed", "done"})
MOVES: dict[RunState, frozenset[RunState]] = {
    "created": frozenset({"launching", "failed", "stopped"}),
    "launching": _ENDS | {"running", "stopping"},
    "running": _ENDS | {"stopping"},
    "stopping": _ENDS,
    "stopped": frozenset({"created", "launching"}),
    "interrupted": frozenset({"created", "launching"}),
    "failed": frozenset({"created", "launching"}),
    "done": frozenset(),
}
"""From each state to the states that may follow it; staying is always allowed."""

_ACTIVE_PARTS = frozenset({"starting", "running", "stopping"})
_NEW_RUN = "start a new run"
"""A hint that says so is about what a resume would only repeat."""


def may_move(old: RunState, new: RunState) -> bool:
    """Tell whether a run in state `old` may become `new`."""
    return new == old or new in MOVES[old]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """What is known about one node's part of an attempt."""

    node: str
    status: AttemptStatus | None = None
    """None: the node is silent, or answers but has never heard of this attempt."""
    silent_s: float | None = None
    """How long the node has not answered; None: it answers."""

    @property
    def answers(self) -> bool:
        return self.silent_s is None

    @property
    def active(self) -> bool:
        return self.status is not None and self.status.state in _ACTIVE_PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Everything that a verdict rests on."""

    parts: tuple[RunPart, ...]
    stop_asked: bool = False
    launching: bool = False
    """A living launcher is still at work: parts may be missing."""
    is_ours: bool = True
    """Launched from this book: every part was there once. Else another master, whom we cannot see,
    may still be launching it."""
    step: int | None = None
    """Newest step that any journal tells."""
    idle_s: float = 0.0
    """How long no journal has told a new step."""
    lost_after_s: float = 15.0
    """A silent node is lost when the others have stood still for so long."""
    checkpoint_step: int | None = None
    """Newest checkpoint known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateJudgement:
    state: RunState
    message: str = ""
    hint: str = ""
    stop: tuple[str, ...] = ()
    """Nodes whose part has to be stopped."""


def judge(situation: Situation) -> StateJudgement:
    """Return the state of the run, why, and which nodes' parts must be stopped."""
    culprit = _find_culprit(situation)
    if culprit is not None:
        stop = tuple(part.node for part in situation.parts if part.active)
        return replace(_describe_failure(culprit, situation), stop=stop)
    if any(part.active for part in situation.parts):
        return _judge_active(situation)
    return _judge_ended(situation)


def is_peer_loss(status: AttemptStatus) -> bool:
    """Tell whether a part failed only because ranks of another node vanished."""
    return status.state == "failed" and status.peer_lost


def _find_culprit(situation: Situation) -> RunPart | None:
    parts = situation.parts
    for part in parts:
        if part.answers and _is_gone(part, situation):
            return part
    failed = [p for p in parts if p.status is not None and p.status.state == "failed"]
    own = [p for p in failed if p.status is not None and not is_peer_loss(p.status)]
    if own:
        return min(own, key=_end_time)
    silent = [p for p in parts if not p.answers]
    if silent and (failed or _stands_still(situation)):
        return max(silent, key=lambda part: part.silent_s or 0.0)
    if any(part.active for part in parts) and situation.idle_s < situation.lost_after_s:
        return None  # only consequences so far: whoever caused them ends or goes silent soon
    return min(failed, key=_end_time) if failed else None


def _is_gone(part: RunPart, situation: Situation) -> bool:
    """Tell whether a node that answers has lost its part, or never got it."""
    if part.status is not None:
        return part.status.state == "lost"
    if situation.launching:
        return False
    return situation.is_ours or not any(other.active for other in situation.parts)


def _end_time(part: RunPart) -> float:
    ended_s = part.status.ended_s if part.status else None
    return ended_s if ended_s is not None else float("inf")


def _stands_still(situation: Situation) -> bool:
    """A silent node holds up the rest: nothing moves, and somebody is still waiting."""
    silent_s = max((p.silent_s or 0.0 for p in situation.parts if not p.answers), default=0.0)
    return (
        any(part.active for part in situation.parts)
        and silent_s >= situation.lost_after_s
        and situation.idle_s >= situation.lost_after_s
    )


def _describe_failure(culprit: RunPart, situation: Situation) -> StateJudgement:
    status = culprit.status
    others = [p.node for p in situation.parts if p is not culprit and p.answers]
    if status is not None and status.state == "failed":
        if not is_peer_loss(status):
            return StateJudgement(
                state="failed", message=status.message, hint=_hint(status.hint, situation)
            )
        return StateJudgement(
            state="interrupted",
            message=f"the nodes lost contact with each other{_where(situation)}",
            hint=_hint("Check the network with: rackless check", situation),
        )
    if situation.stop_asked:
        return StateJudgement(
            state="stopped", message=f"node {culprit.node} was lost while the run was stopped"
        )
    resume = f"Resume on {show_list(others)}." if others else "Resume once a node answers again."
    if culprit.answers and status is None:
        return StateJudgement(
            state="interrupted",
            message=f"node {culprit.node} has no part of the run: its launch broke off, or the "
            "agent's folder there was removed",
            hint="Resume the run.",
        )
    return StateJudgement(
        state="interrupted",
        message=f"node {culprit.node} was lost{_where(situation)}",
        hint=resume,
    )


def _where(situation: Situation) -> str:
    newest = (
        "; there is no checkpoint yet"
        if situation.checkpoint_step is None
        else f"; newest checkpoint is step {situation.checkpoint_step}"
    )
    return (f" at step {situation.step}" if situation.step is not None else "") + newest


def _hint(hint: str, situation: Situation) -> str:
    if situation.checkpoint_step is None or _NEW_RUN in hint:
        return hint
    if not hint:
        return f"Resume from step {situation.checkpoint_step}."
    return f"{hint.rstrip('.')}. Then resume from step {situation.checkpoint_step}."


def _judge_active(situation: Situation) -> StateJudgement:
    silent = [part.node for part in situation.parts if not part.answers]
    message = (
        f"{show_list(silent)} cannot be reached; training goes on without us" if silent else ""
    )
    states = {part.status.state for part in situation.parts if part.status is not None}
    if situation.stop_asked or "stopping" in states or "stopped" in states:
        return StateJudgement(state="stopping", message=message)
    if situation.launching:
        return StateJudgement(state="launching", message=message)
    return StateJudgement(state="running", message=message)


def _judge_ended(situation: Situation) -> StateJudgement:
    """No part is active and nothing went wrong: done, stopped, or nobody can tell."""
    states = [part.status.state for part in situation.parts if part.status is not None]
    silent = [part.node for part in situation.parts if not part.answers]
    if not states:
        return _judge_unanswered(situation, silent)
    note = _silent_note(silent)
    if all(state == "done" for state in states):
        return StateJudgement(state="done", message=note)
    return StateJudgement(state="stopped", message=note)


def _judge_unanswered(situation: Situation, silent: Sequence[str]) -> StateJudgement:
    if situation.launching or not silent:
        return StateJudgement(state="launching")
    state: RunState = "stopping" if situation.stop_asked else "running"
    return StateJudgement(
        state=state,
        message=f"{show_list(silent)} cannot be reached; what the run does now is not known",
        hint="Its ranks go on by themselves. It is looked at again as soon as a node answers.",
    )


def _silent_note(silent: Sequence[str]) -> str:
    if not silent:
        return ""
    return (
        f"{show_list(silent)} could not be reached; what may still run there is stopped when it "
        "answers again"
    )

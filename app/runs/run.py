"""Run states, the legal moves between them, and the judgement of the nodes' reports.

Pure: no clock, no network. A judgement is always about one attempt. Its rules, in this order:

1. A silent node proves nothing by itself, since training does not need the master. It counts as
   lost only if the others report a lost peer, or make no progress, for `lost_after_s`.
2. The culprit is the first failure: a lost or silent node before a rank that failed, a rank that
   failed on its own before ranks that merely lost their peers.
3. While only ranks that lost their peers have failed, the culprit is still unknown.
4. Once there is a culprit, every part that is still active has to be stopped, unless their ranks
   may continue in their processes: then the nodes decide, and the master waits for them.
5. Once they have regrouped, the parts that were left out say nothing about the run any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agents.contract.election import is_majority
from agents.contract.run import AttemptStatus, FailureCause
from app.events import RunState
from app.text import show_list, show_moment

_ENDS: frozenset[RunState] = frozenset({"stopped", "interrupted", "failed", "done"})
MOVES: dict[RunState, frozenset[RunState]] = {
    "created": frozenset({"launching", "failed", "stopped"}),
    "launching": _ENDS | {"running", "stopping"},
    "running": _ENDS | {"stopping"},
    "stopping": _ENDS,
    "stopped": frozenset({"created", "launching"}),
    # To stopped: by a user who does not want it to be resumed automatically.
    "interrupted": frozenset({"created", "launching", "stopped"}),
    "failed": frozenset({"created", "launching", "stopped"}),
    "done": frozenset(),
}
"""States that may follow each state; staying in a state is always allowed."""

EndCause = FailureCause | Literal["lost", "unlaunched"]
"""Cause of an attempt's end. `lost`: a node, or all processes of its part, vanished; `unlaunched`:
a part never existed; empty: nothing failed, or the cause is unknown."""

STANDSTILL_S = 5.0
"""Silence of all visible ranks after which a run counts as standing still, in seconds."""
REGROUP_S = 40.0
"""Maximum time for ranks to regroup after the end of a part, in seconds; they give up sooner."""
REGROUP_IDLE_S = 15.0
"""Standstill allowed to regrouping ranks, in addition to the one that shows a loss, in seconds."""
_LOOP_PHASES = frozenset({"training", "adapting", "evaluating", "saving", "tracing", "regrouping"})
"""Phases of ranks whose work can continue after a regrouping."""
_ACTIVE_PARTS = frozenset({"starting", "running", "stopping"})
# Such a hint of the trainer is about an error that a resume would only repeat.
_NEW_RUN = "start a new run"


def may_move(old: RunState, new: RunState) -> bool:
    """Return True if a run in state `old` may become `new`."""
    return new == old or new in MOVES[old]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """Last known status of one node's part of an attempt."""

    node: str
    status: AttemptStatus | None = None
    """None if the node is silent, or answers but does not know this attempt."""
    silent_s: float | None = None
    """Time since the node last answered; None while it answers."""

    @property
    def answers(self) -> bool:
        return self.silent_s is None

    @property
    def active(self) -> bool:
        return self.status is not None and self.status.state in _ACTIVE_PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """All data for a judgement."""

    parts: tuple[RunPart, ...]
    stop_asked: bool = False
    launching: bool = False
    """True if a process is still launching it, so that parts may be missing."""
    is_ours: bool = True
    """True if this master launched it, so that every part existed once. Otherwise another master,
    which we cannot see, may still be launching it."""
    step: int | None = None
    """Newest step in any journal."""
    idle_s: float = 0.0
    """Time without a new step in any journal, in seconds."""
    lost_after_s: float = 60.0
    """Time without progress after which a silent node counts as lost, in seconds."""
    checkpoint_step: int | None = None
    """Newest known checkpoint."""
    now_s: float = 0.0
    """Time of the judgement, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateJudgement:
    state: RunState
    message: str = ""
    hint: str = ""
    stop: tuple[str, ...] = ()
    """Nodes whose parts have to be stopped."""
    cause: EndCause = ""


def judge(situation: Situation) -> StateJudgement:
    """Return the state of the run, the reason, and the nodes whose parts have to be stopped."""
    parts = situation.parts
    nodes = [part.node for part in parts]
    situation = replace(situation, parts=find_present(parts))
    culprit = _find_culprit(situation)
    if culprit is not None and not _awaits_regroup(culprit, situation, nodes):
        stop = tuple(part.node for part in situation.parts if part.active)
        return replace(_describe_failure(culprit, situation), stop=stop)
    if any(part.active for part in situation.parts):
        return _judge_active(situation, [part for part in parts if part not in situation.parts])
    return _judge_ended(situation)


def find_present(parts: Sequence[RunPart]) -> tuple[RunPart, ...]:
    """Return the parts of the nodes that train since the newest regrouping, or all parts.

    One node alone may name any group, so a group has to be a majority that agrees on it.
    """
    names = [_name_at_launch(part) for part in parts]
    claims = {(part.status.generation, part.status.members) for part in parts if part.status}
    for generation, members in sorted(claims, reverse=True):
        group = tuple(part for part in parts if _name_at_launch(part) in members)
        agree = all(
            (part.status.generation, part.status.members) == (generation, members)
            # Its ranks have lost another node since, and regrouped once more.
            or part.status.generation > generation
            for part in group
            if part.status is not None
        )
        if group and agree and is_majority(members, names):
            return group
    return tuple(parts)


def _name_at_launch(part: RunPart) -> str:
    """Return the node's name when the attempt was launched, which its ranks use."""
    return part.status.node if part.status else part.node


def _awaits_regroup(culprit: RunPart, situation: Situation, nodes: Sequence[str]) -> bool:
    """Return True if the remaining ranks may continue in their processes, and still have time."""
    active = {part.node: part.status for part in situation.parts if part.active and part.status}
    if situation.stop_asked or len(active) < 2 or not is_majority(active, nodes):
        return False
    for status in active.values():
        if not status.may_regroup or any(r.phase not in _LOOP_PHASES for r in status.ranks):
            return False
    ended_s = culprit.status.ended_s if culprit.status else None
    if ended_s is not None:
        return situation.now_s - ended_s < REGROUP_S
    shows_s = 0.0 if culprit.answers else situation.lost_after_s
    return situation.idle_s < shows_s + REGROUP_IDLE_S


def is_peer_loss(status: AttemptStatus) -> bool:
    """Return True if a part failed only because ranks of another node vanished."""
    return status.state == "failed" and status.peer_lost


def _find_culprit(situation: Situation) -> RunPart | None:
    parts = situation.parts
    # A lost part comes first: ranks elsewhere fail because of it, never the other way round.
    for part in parts:
        if part.answers and _is_gone(part, situation):
            return part
    failed = [p for p in parts if p.status is not None and p.status.state == "failed"]
    # Of independent failures, the first one may have caused the others.
    own = [p for p in failed if p.status is not None and not is_peer_loss(p.status)]
    if own:
        return min(own, key=_end_time)
    silent = [p for p in parts if not p.answers]
    if silent and (failed or _stands_still(situation)):
        return max(silent, key=lambda part: part.silent_s or 0.0)
    # Ranks that load report no idle time, but without the failed ones they wait in vain.
    since_s = situation.now_s - min(map(_end_time, failed), default=situation.now_s)
    waited_s = max(situation.idle_s, since_s)
    if any(part.active for part in parts) and waited_s < situation.lost_after_s:
        return None  # only consequences so far: the cause will show soon
    return min(failed, key=_end_time) if failed else None


def _is_gone(part: RunPart, situation: Situation) -> bool:
    """Return True if a node that answers has lost its part, or never got it."""
    if part.status is not None:
        return part.status.state == "lost"
    if situation.launching:
        return False
    # Another master may still be launching it, unless all of its parts have ended.
    return situation.is_ours or not any(other.active for other in situation.parts)


def _end_time(part: RunPart) -> float:
    ended_s = part.status.ended_s if part.status else None
    # An end at an unknown time never precedes a known one.
    return ended_s if ended_s is not None else float("inf")


def _stands_still(situation: Situation) -> bool:
    """Return True if a silent node blocks the others: they are active but make no progress."""
    silent_s = max((p.silent_s or 0.0 for p in situation.parts if not p.answers), default=0.0)
    # Both are required: the node may only have lost the master, and a step may just be slow.
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
                state="failed",
                message=status.message,
                hint=_hint(status.hint, situation),
                cause=status.cause,
            )
        return _describe_peer_loss(situation)
    if situation.stop_asked:
        return StateJudgement(
            state="stopped", message=f"node {culprit.node} was lost while the run was stopping"
        )
    resume = f"Resume on {show_list(others)}." if others else "Resume once a node answers again."
    if culprit.answers and status is None:
        return StateJudgement(
            state="interrupted",
            message=f"node {culprit.node} does not have its part of the run: the launch was "
            "interrupted, or the agent's folder there was removed",
            hint="Resume the run.",
            cause="unlaunched",
        )
    if culprit.answers and status is not None:
        # The node answers, so the message has its own report about its part.
        message = f"node {culprit.node} lost its part{_where(situation)}. {status.message}"
        if status.restarted_s is not None:
            moment = show_moment(status.restarted_s, situation.now_s)
            message = f"{_name_restarted(culprit, situation.parts, moment)}{_where(situation)}"
    else:
        message = f"node {culprit.node} was lost{_where(situation)}"
    return StateJudgement(state="interrupted", message=message.strip(), hint=resume, cause="lost")


def _name_restarted(culprit: RunPart, parts: Sequence[RunPart], moment: str) -> str:
    """Return the nodes that restarted and lost their parts; a power cut affects several at once."""
    nodes = [
        part.node
        for part in parts
        if part.answers and part.status is not None and part.status.restarted_s is not None
    ]
    if len(nodes) == 1:
        return f"node {culprit.node} was restarted at {moment} and lost its part"
    names = show_list(nodes)
    return f"nodes {names} were restarted, {culprit.node} at {moment}, and lost their parts"


def _describe_peer_loss(situation: Situation) -> StateJudgement:
    """Describe a run whose ranks merely lost each other, by their reports about one another."""
    failed = [p.status for p in situation.parts if p.status and is_peer_loss(p.status)]
    named = {name for status in failed for name in status.lost_nodes}
    message = "the nodes lost their connection to each other"
    standing = [p.status.message for p in situation.parts if p.active and p.status]
    # Two nodes that name each other were both cut off, so neither is known to be the cause.
    if len(named) == 1:
        message = f"node {min(named)} was lost: the others could not reach it"
    elif len(standing) == 1 and standing[0]:
        message = standing[0].rstrip(".")  # a hanging rank that the others gave up
    return StateJudgement(
        state="interrupted",
        message=f"{message}{_where(situation)}",
        hint=_hint("Check the network: rackless check", situation),
        cause="peer_lost",
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


def _judge_active(situation: Situation, left_out: Sequence[RunPart]) -> StateJudgement:
    silent = [part.node for part in situation.parts if not part.answers]
    without = [f"{_name_losses(left_out)}; the others train on."] if left_out else []
    message = " ".join([*without, *_describe_standstill(situation, silent)])
    states = {part.status.state for part in situation.parts if part.status is not None}
    # Parts end one after the other: once one has stopped, the run is stopping.
    if situation.stop_asked or "stopping" in states or "stopped" in states:
        return StateJudgement(state="stopping", message=message)
    if situation.launching:
        return StateJudgement(state="launching", message=message)
    return StateJudgement(state="running", message=message)


def _name_losses(left_out: Sequence[RunPart]) -> str:
    """Return the cause of the end of the parts that the others left behind."""
    failed = {p.node: p.status for p in left_out if p.status and p.status.state == "failed"}
    causes = {n: s.message for n, s in failed.items() if s.message and not is_peer_loss(s)}
    silent = [part.node for part in left_out if part.node not in causes]
    lost = [f"{show_list(silent)} {'was' if len(silent) == 1 else 'were'} lost"] if silent else []
    return "; ".join([*(message.rstrip(".") for message in causes.values()), *lost])


def _describe_standstill(situation: Situation, silent: Sequence[str]) -> list[str]:
    """Return a sentence on silent nodes, and the others' reports of hanging ranks."""
    said = [part.status.message for part in situation.parts if part.active and part.status]
    standing = [message for message in said if message]
    if not silent:
        return standing
    # The ranks wait for each other in each step: if the visible ones progress, all do.
    is_still = bool(standing) or situation.idle_s >= STANDSTILL_S
    how = (
        f"the other ranks have waited for {situation.idle_s:.0f} s"
        if is_still
        else "training continues there"
    )
    return [f"{show_list(silent)} cannot be reached; {how}", *standing]


def _judge_ended(situation: Situation) -> StateJudgement:
    """Judge a run without active parts and without a failure: done, stopped, or unknown."""
    states = [part.status.state for part in situation.parts if part.status is not None]
    silent = [part.node for part in situation.parts if not part.answers]
    if not states:
        return _judge_unanswered(situation, silent)
    note = _silent_note(silent)
    if all(state == "done" for state in states):
        return StateJudgement(state="done", message=note)
    # A part's message about its stop, such as that its last checkpoint could not be saved.
    said = [part.status.message for part in situation.parts if part.status is not None]
    cause = next((text for text in said if text), "")
    return StateJudgement(state="stopped", message=f"{cause} {note}".strip())


def _judge_unanswered(situation: Situation, silent: Sequence[str]) -> StateJudgement:
    if situation.launching or not silent:
        return StateJudgement(state="launching")
    state: RunState = "stopping" if situation.stop_asked else "running"
    return StateJudgement(
        state=state,
        message=f"{show_list(silent)} cannot be reached; the state of the run is unknown",
        hint="Ranks need no master to train. The state is updated as soon as a node answers.",
    )


def _silent_note(silent: Sequence[str]) -> str:
    if not silent:
        return ""
    return (
        f"{show_list(silent)} could not be reached; processes left there are stopped once "
        "it answers again"
    )

"""Decide when a run that lost a rank or a node is resumed automatically.

Pure: no clock, no network. Only losses are recovered: after another failure, such as bad data, a
wrong setting or a bug, a restart would fail again. Three limits keep a recovery from making things
worse: a run without progress is left alone, recoveries within an hour wait longer each time and
have a maximum, and a refused resume is retried for an hour at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agents.contract.election import (
    HOUR_S,
    MAX_LOSSES_AT_ONE_STEP,
    back_off_s,
    recent_recoveries,
    stands_still,
)
from agents.contract.run import LOST_CAUSES
from agents.contract.spec import RunSpec
from app.events import RunState
from app.runs.rejoin import REJOIN
from app.runs.run import EndCause
from app.storage.recoveries import Loss
from app.text import count_of, show_duration

LOSSES: frozenset[EndCause] = frozenset({*LOST_CAUSES, "lost", "diverged"})
"""Causes of an end that a resume does not repeat."""
RETRY_S = (2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Wait after a refused resume by the number of refusals, in seconds."""
MAX_REFUSED_S = HOUR_S
"""Maximum time of retrying a refused resume, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """Refused resumes of one loss, such as while no node answers."""

    count: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    """Times of the first and the last one, in seconds since the epoch."""
    text: str = ""
    """Reason of the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryDecision:
    act: Literal["resume", "wait", "give_up"]
    until_s: float = 0.0
    """End of the wait, in seconds since the epoch."""
    reason: str = ""


def find_obstacle(
    spec: RunSpec,
    state: RunState,
    cause: EndCause,
    *,
    is_ours: bool,
    stop_asked: bool,
    per_hour: int,
) -> str | None:
    """Return why an ended attempt is not resumed automatically, or None if it is.

    Args:
        spec: settings of the run.
        state: state of the run before the end.
        cause: cause of the attempt's end.
        is_ours: True if this master launched it; another master's run is only watched.
        stop_asked: True if the user has stopped the run.
        per_hour: maximum number of recoveries within an hour, a setting.
    """
    if stop_asked:
        return "the user stopped it"
    if cause == "diverged" and spec.divergence == "wait":
        return "the run file says divergence: wait"
    # A missing part counts as lost only if all parts existed before.
    if cause not in LOSSES and not (cause == "unlaunched" and state == "running"):
        return "a resume would repeat the failure"
    if spec.recovery == "off":
        return "the run file says recovery: off"
    if per_hour < 1:
        return "the setting recoveries_per_hour is 0"
    if not is_ours:
        return "another master launched it"
    return None


def decide_recovery(
    losses: Sequence[Loss], refusals: Refusals, now_s: float, per_hour: int
) -> RecoveryDecision:
    """Decide what to do about the newest of `losses`, which is pending.

    Args:
        losses: losses of the run since the user last started or resumed it, oldest first,
            including stops for joining nodes; these have their own limits in `rejoin`.
        refusals: refused resumes of the newest loss.
        now_s: time, in seconds since the epoch.
        per_hour: maximum number of recoveries within an hour.
    """
    newest = losses[-1]
    is_rejoin, losses = newest.cause == REJOIN, [one for one in losses if one.cause != REJOIN]
    if per_hour < 1:
        return RecoveryDecision(act="give_up", reason="the setting recoveries_per_hour is 0")
    if not is_rejoin and stands_still([loss.step for loss in losses]):
        at = f"at step {newest.step}" if newest.step else "before its first step"
        return RecoveryDecision(
            act="give_up",
            reason=f"it was lost {MAX_LOSSES_AT_ONE_STEP} times {at} without getting further",
        )
    if refusals.count and now_s - refusals.first_s >= MAX_REFUSED_S:
        return RecoveryDecision(
            act="give_up",
            reason=f"it could not be resumed for {show_duration(MAX_REFUSED_S)}: {refusals.text}",
        )
    recent = recent_recoveries((loss.resumed_s for loss in losses), now_s)
    if not is_rejoin and len(recent) >= per_hour:
        times = count_of(len(recent), "recovery", "recoveries")
        return RecoveryDecision(
            act="wait",
            until_s=recent[len(recent) - per_hour] + HOUR_S,
            reason=f"{times} within an hour",
        )
    pause_s = back_off_s(len(recent))
    if not is_rejoin and newest.ended_s <= now_s < newest.ended_s + pause_s:
        return RecoveryDecision(
            act="wait",
            until_s=newest.ended_s + pause_s,
            reason=f"it was lost {count_of(len(recent) + 1, 'time')} within an hour",
        )
    if refusals.count:
        pause_s = RETRY_S[min(refusals.count, len(RETRY_S)) - 1]
        if refusals.last_s <= now_s < refusals.last_s + pause_s:
            return RecoveryDecision(
                act="wait", until_s=refusals.last_s + pause_s, reason=refusals.text
            )
    return RecoveryDecision(act="resume")

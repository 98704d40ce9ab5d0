"""Collect the interruptions of a run from the store and its journals."""

from __future__ import annotations

from collections.abc import Sequence

from app.events import ACTIVE_STATES
from app.interruption import Interruption
from app.runs.journals.attempt_history import AttemptHistory, HeatPause
from app.runs.journals.history import RunHistory
from app.runs.rejoin import REJOIN
from app.runs.services import Services
from app.storage.recoveries import Loss
from app.storage.runs import AttemptRecord
from app.text import show_celsius


def list_interruptions(services: Services, run_id: str) -> tuple[Interruption, ...]:
    """Return the interruptions of a run, oldest first."""
    attempts = {one.attempt: one for one in services.runs.store.attempts(run_id)}
    losses = services.recoveries.all_of_run(run_id)
    history = services.runs.history(run_id)
    found = [_collect(loss, losses, attempts, history) for loss in losses]
    run = services.runs.get(run_id)
    newest = run.attempt if run.state in ACTIVE_STATES else None
    for number, attempt in history.attempts.items():
        found += [_describe_pause(one, is_open=number == newest) for one in attempt.pauses]
    for number in sorted(history.attempts):
        found += _collect_regroupings(history.attempts[number], attempts.get(number))
    return tuple(sorted(found, key=lambda one: one.noticed_s))


def find_interruption(services: Services, run_id: str, resumed: int) -> Interruption | None:
    """Return the interruption that attempt `resumed` ended, or None."""
    losses = services.recoveries.all_of_run(run_id)
    for loss in losses:
        if loss.resumed_attempt == resumed:
            attempts = {one.attempt: one for one in services.runs.store.attempts(run_id)}
            return _collect(loss, losses, attempts, services.runs.history(run_id))
    return None


def _collect(
    loss: Loss, losses: Sequence[Loss], attempts: dict[int, AttemptRecord], history: RunHistory
) -> Interruption:
    number = loss.resumed_attempt
    if number is None and loss.state == "replaced":  # the loss has no record of a user's resume
        number = min((one for one in attempts if one > loss.attempt), default=None)
    ended, next_one = attempts.get(loss.attempt), attempts.get(number) if number else None
    first = history.attempt(number).first if number else None
    known = [
        history.attempts[one].newest for one in sorted(history.attempts) if one <= loss.attempt
    ]
    newest = next((one for one in reversed(known) if one is not None), None)
    has_trained = history.attempt(loss.attempt).newest is not None
    return Interruption(
        kind="rejoin" if loss.cause == REJOIN else "loss",
        state=loss.state,
        reason=loss.reason,
        # The last step may end after the loss was noted.
        step=max(loss.step, newest.step if newest is not None and has_trained else 0),
        nodes=history.attempt(loss.attempt).members or _nodes_of(ended),
        has_trained=has_trained,
        last_step_s=newest.time_s if newest is not None else None,
        noticed_s=loss.ended_s,
        # A node may have been left out long before, so this counts before the first step alone.
        lost_s=None if newest else _find_loss_s(history.attempt(loss.attempt), loss.ended_s),
        resumed_s=loss.resumed_s or (next_one.launched_s if next_one else None),
        resumed_nodes=_nodes_of(next_one),
        resume_step=(next_one.resume_step or 0) if next_one else 0,
        training_s=first.time_s if first is not None else None,
        is_cut=first is None and any(one.attempt == number for one in losses),
    )


def _find_loss_s(attempt: AttemptHistory, noticed_s: float) -> float | None:
    lost_s = attempt.find_loss_s()
    return None if lost_s is None else min(lost_s, noticed_s)


def _describe_pause(one: HeatPause, *, is_open: bool) -> Interruption:
    at = f": {show_celsius(one.celsius)}" if one.celsius is not None else ""
    return Interruption(
        kind="heat",
        state="cooling" if is_open and one.ended_s is None else "recovered",
        reason=f"{one.gpu}{at}",
        step=one.step,
        nodes=(one.node,),
        last_step_s=None,
        noticed_s=one.began_s,
        resumed_nodes=(one.node,),
        resume_step=one.step,
        training_s=one.ended_s,
    )


def _collect_regroupings(
    attempt: AttemptHistory, launched: AttemptRecord | None
) -> list[Interruption]:
    """Return the losses that the attempt survived."""
    found: list[Interruption] = []
    nodes = _nodes_of(launched)
    for generation in sorted(attempt.regroupings):
        one = attempt.regroupings[generation]
        last, back = attempt.steps.get(one.step), attempt.find_return(one)
        found.append(
            Interruption(
                kind="loss",
                state="recovered" if back else "resumed",
                reason=attempt.describe_lost(one),
                step=one.step,
                nodes=nodes or (*one.nodes, *one.lost_nodes),
                last_step_s=last.time_s if last else None,
                noticed_s=one.noticed_s,
                resumed_s=one.time_s,
                resumed_nodes=one.nodes,
                resume_step=one.step,
                training_s=back.time_s if back else None,
                is_regrouped=True,
            )
        )
        nodes = one.nodes
    return found


def _nodes_of(attempt: AttemptRecord | None) -> tuple[str, ...]:
    places = attempt.placements if attempt else ()
    return tuple(dict.fromkeys(place.node for place in places))

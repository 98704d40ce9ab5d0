"""When a run that lost a rank or a node is resumed, and when it is left alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest

from agents.contract.election import BACK_OFF_S, HOUR_S
from agents.contract.run import FailureCause
from agents.contract.spec import DataSpec, RunSpec
from app.runs.recovery import (
    LOSSES,
    MAX_REFUSED_S,
    RETRY_S,
    RecoveryDecision,
    Refusals,
    decide_recovery,
    find_obstacle,
)
from app.storage.recoveries import Loss

SPEC = RunSpec(model="m", data=DataSpec(train="t"))
NOW_S = 1_000_000.0
CAUSES = (*get_args(FailureCause), "lost", "unlaunched")


def make_losses(*steps: int, gap_s: float = 600.0, now_s: float = NOW_S) -> list[Loss]:
    """Return losses at these steps, each resumed a second later, of which the newest is pending."""
    losses = []
    for number, step in enumerate(steps):
        ended_s = now_s - gap_s * (len(steps) - 1 - number)
        loss = Loss(
            run_id="r",
            attempt=number + 1,
            cause="lost",
            step=step,
            ended_s=ended_s,
            state="recovered",
            resumed_s=ended_s + 1.0,
            resumed_attempt=number + 2,
        )
        losses.append(loss)
    losses[-1] = replace(losses[-1], state="pending", resumed_s=None, resumed_attempt=None)
    return losses


def decide(
    losses: list[Loss], now_s: float = NOW_S, per_hour: int = 6, refusals: Refusals | None = None
) -> RecoveryDecision:
    return decide_recovery(losses, refusals or Refusals(), now_s, per_hour)


def test_only_losses_of_our_own_runs_are_recovered_unless_a_person_says_no() -> None:
    losses = ("killed", "crashed", "stalled", "slept", "peer_lost", "share_lost", "lost")
    for cause, state, recovery, is_ours, stop_asked, per_hour in itertools.product(
        CAUSES,
        ("launching", "running", "stopping"),
        ("auto", "off"),
        (True, False),
        (True, False),
        (0, 6),
    ):
        obstacle = find_obstacle(
            replace(SPEC, recovery=recovery),
            state,
            cause,
            is_ours=is_ours,
            stop_asked=stop_asked,
            per_hour=per_hour,
        )
        # With `divergence: wait`, which is the default, a person decides.
        is_loss = cause in losses or (cause, state) == ("unlaunched", "running")
        is_allowed = recovery == "auto" and is_ours and not stop_asked and per_hour > 0
        assert (obstacle is None) == (is_loss and is_allowed), (cause, state, obstacle)
        assert obstacle != ""


def test_failures_that_a_resume_repeats_are_no_losses() -> None:
    assert not LOSSES & {"", "error", "unlaunched"}
    assert set(CAUSES) - LOSSES == {"", "error", "unlaunched"}


def test_the_first_loss_is_recovered_at_once() -> None:
    assert decide(make_losses(120)).act == "resume"


def test_each_further_loss_within_an_hour_waits_longer() -> None:
    waited = []
    for count in range(1, 9):
        losses = make_losses(*range(10, 10 + count), gap_s=60.0)
        decision = decide(losses, per_hour=60)
        waited.append(decision.until_s - NOW_S if decision.act == "wait" else 0.0)
        assert decide(losses, NOW_S + waited[-1], per_hour=60).act == "resume"
    assert waited == [*BACK_OFF_S, BACK_OFF_S[-1], BACK_OFF_S[-1]]


def test_losses_of_earlier_hours_are_no_reason_to_wait() -> None:
    assert decide(make_losses(10, 20, 30, gap_s=HOUR_S + 2)).act == "resume"


def test_recoveries_within_an_hour_are_bounded() -> None:
    losses = make_losses(1, 2, 3, 4, 5, gap_s=700.0)
    assert decide(losses, NOW_S + 400.0, per_hour=5).act == "resume"
    decision = decide(losses, NOW_S + 400.0, per_hour=4)
    assert (decision.act, decision.reason) == ("wait", "4 recoveries within an hour")
    # Until the oldest one is an hour old.
    assert decision.until_s == losses[0].resumed_s + HOUR_S
    assert decide(losses, decision.until_s, per_hour=4).act == "resume"
    assert decide(losses, NOW_S, per_hour=0).act == "give_up"


@pytest.mark.parametrize(
    ("steps", "gives_up"),
    [
        ((7,), False),
        ((7, 7), False),
        ((7, 7, 7), True),
        ((7, 5, 7), True),  # the resumed attempts did not get beyond step 7
        ((7, 5, 6), True),
        ((0, 0, 0), True),
        ((7, 7, 8), False),
        ((7, 8, 8), False),
        ((7, 8, 8, 8), True),
        ((1, 2, 3, 4), False),
    ],
)
def test_a_run_that_does_not_get_further_is_left_alone(
    steps: tuple[int, ...], gives_up: bool
) -> None:
    # However long ago the others were: otherwise it would go on like that for ever.
    decision = decide(make_losses(*steps, gap_s=2 * HOUR_S))
    assert (decision.act == "give_up") == gives_up
    if gives_up:
        assert "3 times" in decision.reason
        assert ("before its first step" in decision.reason) == (max(steps) == 0)


def test_a_refused_resume_is_tried_again_less_and_less_often_and_for_an_hour() -> None:
    losses, first_s = make_losses(5), NOW_S
    last_s, count, tries = first_s, 1, 1
    while True:
        refusals = Refusals(count=count, first_s=first_s, last_s=last_s, text="no node answers")
        decision = decide(losses, last_s, refusals=refusals)
        if decision.act == "give_up":
            break
        assert (decision.act, decision.reason) == ("wait", "no node answers")
        assert decision.until_s - last_s == RETRY_S[min(count, len(RETRY_S)) - 1]
        last_s, count, tries = decision.until_s, count + 1, tries + 1
        assert decide(losses, last_s, refusals=refusals).act in ("resume", "give_up")
    assert last_s - first_s >= MAX_REFUSED_S
    assert tries < 80
    assert "no node answers" in decision.reason


def test_a_clock_that_was_set_back_blocks_nothing() -> None:
    losses = make_losses(1, 2, 3)
    assert decide(losses, NOW_S - 86_400.0, per_hour=1).act == "resume"

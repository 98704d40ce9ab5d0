"""The learning rate rises, falls, and is above 0 in every step."""

from __future__ import annotations

import pytest

from agents.contract.spec import DataSpec, RunSpec
from agents.trainer.optim.schedule import learning_rate_at


def make_rates(schedule, warmup_share=0.1, total=20):
    spec = RunSpec(
        model="m",
        data=DataSpec(train="t"),
        learning_rate=1.0,
        schedule=schedule,
        warmup_share=warmup_share,
    )
    return [learning_rate_at(spec, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_it_warms_up_in_a_line_and_reaches_the_peak(schedule):
    rates = make_rates(schedule)
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert min(rates) > 0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_it_falls_without_a_jump_to_nearly_nothing(schedule):
    rates = make_rates(schedule)[2:]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1


def test_without_warm_up_the_first_step_is_the_peak():
    assert make_rates("cosine", warmup_share=0.0)[0] == 1.0
    assert make_rates("cosine", total=1) == [1.0]

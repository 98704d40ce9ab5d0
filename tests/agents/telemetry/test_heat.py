"""What follows from the temperatures of a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from agents.contract.node import GpuSample
from agents.contract.run import HeatRule
from agents.telemetry.gpu import TOO_HOT
from agents.telemetry.heat import HeatJudge

PERIOD_S = 2.0


def acts(
    judge: HeatJudge, samples: Iterable[tuple[float | None, str]], begin_s: float = 0.0
) -> list[tuple[float, str]]:
    """Return the acts with their times; a sample is a temperature and a throttle reason."""
    found = []
    for number, (celsius, reason) in enumerate(samples):
        now_s = begin_s + number * PERIOD_S
        sample = GpuSample(
            uuid="g",
            index=0,
            name="x",
            temperature_celsius=celsius,
            throttle=(reason,) if reason else (),
        )
        act = judge.judge(sample, now_s)
        found += [(now_s, act)] if act else []
    return found


@pytest.mark.parametrize(("rule", "act"), [("warn", "warn"), ("wait", "pause"), ("limit", "limit")])
def test_a_minute_of_heat_is_answered_by_the_rule(rule: HeatRule, act: str) -> None:
    warm = [(84.0, TOO_HOT[0]), (84.0, "")] * 15  # it flickers
    assert acts(HeatJudge(rule, 95.0), [*warm, (84.0, TOO_HOT[0])]) == [(60.0, act)]
    brief = [(84.0, TOO_HOT[0])] * 10 + [(84.0, "power limit")] * 60
    assert acts(HeatJudge(rule, 95.0), brief) == []


def test_warnings_are_an_hour_apart_and_the_power_limit_is_lowered_each_minute() -> None:
    hour = [(84.0, TOO_HOT[0])] * 1900
    assert len(acts(HeatJudge("warn", 95.0), hour)) == 2
    assert [at for at, _ in acts(HeatJudge("limit", 95.0), hour[:94])] == [60.0, 122.0, 184.0]


@pytest.mark.parametrize("rule", ["warn", "wait", "limit"])
def test_the_slowdown_temperature_pauses_at_once_until_it_is_cooler(rule: HeatRule) -> None:
    judge = HeatJudge(rule, 95.0)
    assert acts(judge, [(94.0, ""), (96.0, ""), (90.0, ""), (86.5, "")]) == [(2.0, "pause")]
    assert judge.until_celsius == 86.0
    assert acts(judge, [(86.0, ""), (94.0, "")]) == [(0.0, "go_on")]


def test_hardware_that_slows_down_pauses_where_its_temperature_is_not_known() -> None:
    hard = (91.0, TOO_HOT[1])
    assert acts(HeatJudge("warn", None), [hard, hard, (91.0, ""), hard, hard]) == []
    assert acts(HeatJudge("warn", None), [hard] * 3) == [(4.0, "pause")]
    # A threshold that no card has.
    assert acts(HeatJudge("warn", 0.0), [(70.0, "")] * 5) == []


def test_nobody_waits_for_a_sensor_that_is_gone() -> None:
    judge = HeatJudge("warn", 95.0)
    assert acts(judge, [(96.0, ""), (None, ""), (None, "")]) == [(0.0, "pause"), (2.0, "go_on")]

"""Plans that missed by more than a factor of two: named beside the next plan for the same GPUs."""

from __future__ import annotations

import pytest

from app.planning.accuracy.forecast_accuracy import Forecast, Measured, RankForecast
from app.planning.accuracy.misses import PastForecast, find_miss

HERE = {("alpha", "cuda:0"), ("beta", "cuda:0")}


def past(
    run_id: str, planned: float, measured: float, *nodes: str, steps: int = 50
) -> PastForecast:
    ranks = tuple(RankForecast(node=name, device="cuda:0") for name in nodes or ("alpha", "beta"))
    return PastForecast(
        run_id=run_id,
        forecast=Forecast(
            mode="data", family="llama", adapter="lora", longest_tokens=512, ranks=ranks,
            tokens_per_s=planned,
        ),
        measured=Measured(num_steps=steps, ranks=(), tokens_per_s=measured),
    )  # fmt: skip


@pytest.mark.parametrize(("measured", "ratio"), [(400.0, 0.4), (2100.0, 2.1)])
def test_a_plan_that_missed_by_more_than_a_factor_of_two_is_named_with_both_figures(
    measured: float, ratio: float
) -> None:
    found = find_miss([past("r-1", 1000.0, measured)], HERE)
    assert found is not None
    assert (found.run_id, found.nodes, found.ratio) == ("r-1", ("alpha", "beta"), ratio)
    assert (found.planned_tokens_per_s, found.measured_tokens_per_s) == (1000.0, measured)


@pytest.mark.parametrize(
    "runs",
    [
        [past("r-2", 1000.0, 600.0)],
        [past("r-2", 1000.0, 900.0), past("r-1", 1000.0, 100.0)],  # the newest decides
        [past("r-1", 1000.0, 100.0, "alpha")],  # other GPUs
        [past("r-1", 1000.0, 100.0, steps=2)],  # it never warmed up
        [],
    ],
)
def test_a_plan_that_held_or_was_for_other_gpus_is_no_miss(runs: list[PastForecast]) -> None:
    assert find_miss(runs, HERE) is None

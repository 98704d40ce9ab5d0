"""Find an earlier plan for the same GPUs that was off by more than a factor of two.

Learned corrections are bounded, so they cannot repair such a miss; the user is warned instead. The
newest run on the same GPUs decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from app.planning.accuracy.forecast_accuracy import MIN_STEPS, Forecast, Measured

MISS_FACTOR = 2.0
"""Ratio between plan and measurement from which a miss is reported, in either direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastForecast:
    """Forecast and measurement of an attempt."""

    run_id: str
    forecast: Forecast
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMiss:
    """A plan that was off by more than a factor of two."""

    run_id: str
    nodes: tuple[str, ...]
    planned_tokens_per_s: float
    measured_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Measured over planned speed; below 1: the run was slower than planned."""
        return self.measured_tokens_per_s / self.planned_tokens_per_s


def find_miss(past: Iterable[PastForecast], wanted: Set[tuple[str, str]]) -> PlanMiss | None:
    """Return the miss of the newest run on these GPUs; None: no such run, or no miss.

    Args:
        past: attempts, the newest first.
        wanted: node and device of each GPU of the plan.
    """
    for attempt in past:
        planned, seen = attempt.forecast.tokens_per_s, attempt.measured.tokens_per_s
        ranks = {(rank.node, rank.device) for rank in attempt.forecast.ranks}
        # The first steps compile and warm up, so a shorter attempt says nothing about the plan.
        if ranks != wanted or not planned or not seen or attempt.measured.num_steps < MIN_STEPS:
            continue
        if 1 / MISS_FACTOR <= seen / planned <= MISS_FACTOR:
            return None  # a newer run that went as planned outdates older misses
        return PlanMiss(
            run_id=attempt.run_id,
            nodes=tuple(dict.fromkeys(rank.node for rank in attempt.forecast.ranks)),
            planned_tokens_per_s=planned,
            measured_tokens_per_s=seen,
        )
    return None

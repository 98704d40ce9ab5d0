"""Find earlier plans that missed by more than a factor of two on the nodes of this one.

What was learned corrects speeds only within bounds, and a wrong plan is worth a word: whoever reads
the next one should know how far the last one was off. The newest run on the same nodes decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from app.planning.accuracy.forecast_accuracy import MIN_STEPS, Forecast, Measured

MISS_FACTOR = 2.0
"""Ratio between plan and measurement from which a miss is named, in either direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastForecast:
    """Forecast of an attempt, and what it measured."""

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
    """Return how the newest run on these GPUs missed; None: there is none, or it did not.

    Args:
        past: the newest first.
        wanted: node and device of each GPU of the plan.
    """
    for one in past:
        planned, seen = one.forecast.tokens_per_s, one.measured.tokens_per_s
        ranks = {(rank.node, rank.device) for rank in one.forecast.ranks}
        # Steps at the start compile and warm up: they say nothing about the plan.
        if ranks != wanted or not planned or not seen or one.measured.num_steps < MIN_STEPS:
            continue
        if 1 / MISS_FACTOR <= seen / planned <= MISS_FACTOR:
            return None
        return PlanMiss(
            run_id=one.run_id,
            nodes=tuple(dict.fromkeys(rank.node for rank in one.forecast.ranks)),
            planned_tokens_per_s=planned,
            measured_tokens_per_s=seen,
        )
    return None

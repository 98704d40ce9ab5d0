"""Correct forecasts by past exports: measured over forecast, by node and method.

Ratios refer to the uncorrected formulas, so that learning converges. Their median is pulled towards
1 while few exports are known, and bounded, as for runs (app/planning/accuracy/learning.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.contract.formats import ENGINES, Engine
from app.planning.accuracy.learning import NEWEST, Factor, make_factor

SECONDS_LIMITS = (0.2, 5.0)
MEMORY_LIMITS = (0.8, 1.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOutcome:
    """Forecast and measurement of one export, as ratios of measured to forecast."""

    node: str
    method: str
    """Method as named by `maker_of`."""
    ended_s: float
    seconds_ratio: float
    ram_ratio: float | None = None
    vram_ratio: float | None = None


def maker_of(to: str, engine: Engine) -> str:
    """Return the key by which exports are compared: the format, or a second engine of it.

    >>> maker_of("awq", "gptqmodel"), maker_of("awq", "autoawq")
    ('awq', 'autoawq')
    """
    return to if engine == ENGINES[0] else engine


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFactors:
    """Factors by which the formulas' figures are multiplied."""

    seconds: Factor
    ram: Factor
    vram: Factor


def find_factors(outcomes: Sequence[ExportOutcome], node: str, method: str) -> ExportFactors:
    """Return the factors for a method on a node, from exports of that method or else of any there.

    >>> past = [ExportOutcome(node="beta", method="awq", ended_s=t, seconds_ratio=r)
    ...     for t, r in enumerate((2.0, 2.2, 9.0))]
    >>> round(find_factors(past, "beta", "awq").seconds.value, 2)
    2.03
    >>> find_factors(past, "alpha", "awq").seconds.num_runs
    0
    """
    own = [outcome for outcome in outcomes if outcome.node == node]
    alike = [one for one in own if one.method == method]
    among = sorted(alike or own, key=lambda one: one.ended_s, reverse=True)[:NEWEST]
    words = f"of {method} on {node}" if alike else f"on {node}"
    rams = [outcome.ram_ratio for outcome in among if outcome.ram_ratio is not None]
    vrams = [outcome.vram_ratio for outcome in among if outcome.vram_ratio is not None]
    return ExportFactors(
        seconds=make_factor([outcome.seconds_ratio for outcome in among], SECONDS_LIMITS, words),
        ram=make_factor(rams, MEMORY_LIMITS, words),
        vram=make_factor(vrams, MEMORY_LIMITS, words),
    )

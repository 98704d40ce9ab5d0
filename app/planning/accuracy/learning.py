"""Learn from past runs: ratios of measured to forecast values, by card, family and adapter.

A factor is the median over the newest runs, so that a single run on a hot day or during a game has
no lasting effect. It is pulled towards 1 while few runs are known, and bounded: a factor of five is
a mistake that should stay visible. Ratios refer to the uncorrected formulas: a corrected forecast
is divided by its correction first, so that learning converges instead of oscillating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agents.contract.spec import AdapterKind

NEWEST = 9
"""Number of newest outcomes that count, for each factor."""
MEMORY_LIMITS = (0.95, 1.25)
"""Bounds of the memory factor, wider upwards: a forecast that is too low ends in a crash, one that
is too high only wastes a little memory."""
SPEED_LIMITS = (0.3, 2.0)
"""Bounds of the speed factor."""
NETWORK_LIMITS = (0.5, 4.0)
"""Bounds of the factor for seconds on the network."""
# Weight of the prior, a ratio of exactly 1, in outcomes.
_WEIGHT_OF_NONE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """Forecast and measurement of one GPU in one attempt. Ratios are measured over forecast."""

    card: str
    """Name of the GPU, as its driver gives it."""
    family: str
    """Model family, such as `llama`."""
    adapter: AdapterKind
    ended_s: float
    """Wall clock at the end of the attempt, in seconds."""
    memory_ratio: float | None = None
    """Ratio of peak bytes, for the setting that the trainer used."""
    speed_ratio: float | None = None
    """Ratio of tokens per second while the GPU computes."""
    network_ratio: float | None = None
    """Ratio of seconds per step spent on the network."""
    is_calibrated: bool = False
    """True if the forecast of speed was based on a calibration, not on the data sheet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """A multiplier of forecasts."""

    value: float = 1.0
    num_runs: int = 0
    """Number of outcomes it is based on; 0: none, and the value is 1."""
    reason: str = ""
    """Basis of the value in words, shown to the user; empty: no outcomes."""


UNKNOWN = Factor()


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The factors for one GPU."""

    memory: Factor = UNKNOWN
    speed: Factor = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """Outcomes of all past runs."""

    outcomes: tuple[RunOutcome, ...] = ()

    def find(
        self, card: str, family: str, adapter: AdapterKind, *, is_calibrated: bool = False
    ) -> Correction:
        """Return the factors for a card, learned from the most similar runs.

        >>> runs = [RunOutcome(card="RTX 3090", family="llama", adapter="qlora", ended_s=t,
        ...                 speed_ratio=r) for t, r in enumerate((0.8, 0.82, 5.0))]
        >>> found = Corrections(outcomes=tuple(runs)).find("RTX 3090", "llama", "qlora")
        >>> round(found.speed.value, 3), found.speed.reason
        (0.846, '3 past runs of Llama with qlora on this card')
        >>> Corrections(outcomes=tuple(runs)).find("RTX 3090", "gemma", "lora").speed.reason
        '3 past runs on this card'
        """
        own = [outcome for outcome in self.outcomes if outcome.card == card]
        # Calibrated and uncalibrated GPUs have different speed forecasts, with different errors.
        alike = [outcome for outcome in own if outcome.is_calibrated == is_calibrated]
        return Correction(
            memory=_choose(own, family, adapter, lambda run: run.memory_ratio, MEMORY_LIMITS),
            speed=_choose(alike, family, adapter, lambda run: run.speed_ratio, SPEED_LIMITS),
        )

    @property
    def network(self) -> Factor:
        """The factor for seconds on the network, over all runs."""
        ratios = _newest(self.outcomes, lambda outcome: outcome.network_ratio)
        return make_factor(ratios, NETWORK_LIMITS, "over this network")


def _choose(
    own: list[RunOutcome],
    family: str,
    adapter: AdapterKind,
    read: Callable[[RunOutcome], float | None],
    limits: tuple[float, float],
) -> Factor:
    # Imported on use: stores of outcomes load this module, and lists of runs do not choose.
    from agents.shared.models.families import name_family

    same = [outcome for outcome in own if outcome.adapter == adapter]
    # From the most to the least specific; the first group with a measurement decides.
    for among, words in (
        (
            [o for o in same if o.family == family],
            f"of {name_family(family).short} with {adapter} on this card",
        ),
        (same, f"with {adapter} on this card"),
        (own, "on this card"),
    ):
        ratios = _newest(among, read)
        if ratios:
            return make_factor(ratios, limits, words)
    return UNKNOWN


def _newest(
    outcomes: Iterable[RunOutcome], read: Callable[[RunOutcome], float | None]
) -> list[float]:
    by_time = sorted(outcomes, key=lambda outcome: outcome.ended_s, reverse=True)
    ratios = [ratio for outcome in by_time if (ratio := read(outcome)) is not None and ratio > 0]
    return ratios[:NEWEST]


def make_factor(ratios: list[float], limits: tuple[float, float], words: str) -> Factor:
    """Return the bounded median of the ratios; `words` end its reason."""
    if not ratios:
        return UNKNOWN
    from statistics import median  # on use: it loads decimal and fractions, which no list needs

    num = len(ratios)
    # A prior of weight 0.5: the first run counts two thirds, nine count 95 %.
    value = (median(ratios) * num + _WEIGHT_OF_NONE) / (num + _WEIGHT_OF_NONE)
    bounded = min(max(value, limits[0]), limits[1])
    reason = f"{num} past run{'' if num == 1 else 's'} {words}"
    return Factor(value=bounded, num_runs=num, reason=reason)

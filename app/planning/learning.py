"""What past runs teach the next forecast: measured over forecast, by card, family and adapter.

A factor is the median of the newest runs, so one run on a hot day or beside a game moves nothing
for good; it is pulled towards 1 while few runs are known, and bounded, since a factor of five is no
correction but a mistake that has to be seen. Ratios are kept against what the formulas alone say:
a forecast that was itself corrected is divided by its correction first, so that learning converges
instead of swinging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from agents.contract.spec import AdapterKind

NEWEST = 9
"""Outcomes that count, of each kind."""
MEMORY_LIMITS = (0.95, 1.25)
"""A forecast of memory may rise more than it may fall: too low ends in a crash, too high in a
little memory that nobody uses."""
SPEED_LIMITS = (0.3, 2.0)
NETWORK_LIMITS = (0.5, 4.0)
_WEIGHT_OF_NONE = 0.5
"""How many outcomes of exactly 1 the knowledge before any run is worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """Forecast and measurement of one GPU in one attempt. Ratios are measured over forecast."""

    card: str
    """Name of the GPU, as its driver gives it."""
    family: str
    """Model family, such as `llama`."""
    adapter: AdapterKind
    ended_s: float
    """Wall clock; the newest outcomes count."""
    memory_ratio: float | None = None
    """Peak bytes; against the forecast for the setting that was really used."""
    speed_ratio: float | None = None
    """Tokens per second of this GPU while it computes."""
    network_ratio: float | None = None
    """Seconds of a step spent on the network, against the forecast."""
    is_calibrated: bool = False
    """The forecast of speed rested on a measurement of this GPU, not on its data sheet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """What a forecast is multiplied by."""

    value: float = 1.0
    num_runs: int = 0
    """Outcomes behind it; 0: nothing is known, and the value is 1."""
    reason: str = ""
    """What it rests on, in words; empty: nothing."""


UNKNOWN = Factor()


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The factors for one GPU."""

    memory: Factor = UNKNOWN
    speed: Factor = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """All that was learned so far."""

    outcomes: tuple[RunOutcome, ...] = ()

    def find(
        self, card: str, family: str, adapter: AdapterKind, *, is_calibrated: bool = False
    ) -> Correction:
        """Return the factors for a card: of this family and adapter, else of what is nearest.

        A GPU that was measured meanwhile has another forecast of speed than one that was not, so
        that only outcomes of its own kind say by how much that is off.

        >>> runs = [RunOutcome(card="RTX 3090", family="llama", adapter="qlora", ended_s=t,
        ...                 speed_ratio=r) for t, r in enumerate((0.8, 0.82, 5.0))]
        >>> found = Corrections(outcomes=tuple(runs)).find("RTX 3090", "llama", "qlora")
        >>> round(found.speed.value, 3), found.speed.reason
        (0.846, '3 past runs of llama with qlora on this card')
        >>> Corrections(outcomes=tuple(runs)).find("RTX 3090", "gemma", "lora").speed.reason
        '3 past runs on this card'
        """
        own = [outcome for outcome in self.outcomes if outcome.card == card]
        alike = [outcome for outcome in own if outcome.is_calibrated == is_calibrated]
        return Correction(
            memory=_choose(own, family, adapter, _memory_of, MEMORY_LIMITS),
            speed=_choose(alike, family, adapter, _speed_of, SPEED_LIMITS),
        )

    @property
    def network(self) -> Factor:
        """The factor for seconds on the network, over all runs."""
        ratios = _newest(self.outcomes, lambda outcome: outcome.network_ratio)
        return make_factor(ratios, NETWORK_LIMITS, "over this network")


def _memory_of(outcome: RunOutcome) -> float | None:
    return outcome.memory_ratio


def _speed_of(outcome: RunOutcome) -> float | None:
    return outcome.speed_ratio


def _choose(
    own: list[RunOutcome],
    family: str,
    adapter: AdapterKind,
    read: Callable[[RunOutcome], float | None],
    limits: tuple[float, float],
) -> Factor:
    same = [outcome for outcome in own if outcome.adapter == adapter]
    for among, words in (
        ([o for o in same if o.family == family], f"of {family} with {adapter} on this card"),
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
    """Return the bounded median of measured over forecast; `words` end its reason."""
    if not ratios:
        return UNKNOWN
    num = len(ratios)
    value = (median(ratios) * num + _WEIGHT_OF_NONE) / (num + _WEIGHT_OF_NONE)
    bounded = min(max(value, limits[0]), limits[1])
    reason = f"{num} past run{'' if num == 1 else 's'} {words}"
    return Factor(value=bounded, num_runs=num, reason=reason)

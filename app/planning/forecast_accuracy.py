"""Forecast and measurement of one attempt side by side, and what the next forecast learns of it.

Only like is held against like: memory for the setting that the trainer really chose, speed of a GPU
while it computes, and of the network the wait of the rank that waited least, since the others
waited for that rank as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.contract.spec import AdapterKind
from app.planning.learning import RunOutcome
from app.planning.memory.forecast import MemorySetting
from app.planning.memory.gpu import GpuMemory

LEAST_STEPS = 5
"""Fewer steps teach nothing: the first ones compile and warm up."""
_LEAST_NETWORK_S = 0.02
"""Shorter waits are noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankForecast:
    """What was foretold of one rank."""

    node: str
    device: str
    card: str | None = None
    """Name of the GPU; None: a CPU."""
    share: float | None = None
    """Part of each batch, 0 to 1."""
    tokens_per_s: float | None = None
    """While it computes."""
    setting: MemorySetting | None = None
    gpu: GpuMemory | None = None
    """What decides how much memory another setting takes; None: a CPU."""
    allocated_bytes: int | None = None
    """Peak that torch counts, as the trainer reports it."""
    low_bytes: int | None = None
    expected_bytes: int | None = None
    """Of the whole GPU, with what others hold."""
    high_bytes: int | None = None
    memory_parts: tuple[tuple[str, int], ...] = ()
    """Name and bytes, in the order of a stacked bar."""
    memory_factor: float = 1.0
    """What past runs had corrected in `allocated_bytes`."""
    speed_factor: float = 1.0
    """What past runs had corrected in `tokens_per_s`."""
    is_calibrated: bool = False
    """`tokens_per_s` rests on a measurement of this GPU, not on its data sheet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What was foretold of one attempt, as it is stored."""

    mode: str
    family: str
    adapter: AdapterKind
    longest_tokens: int
    ranks: tuple[RankForecast, ...]
    step_s: float | None = None
    network_s: float | None = None
    tokens_per_s: float | None = None
    total_s: float | None = None
    energy_wh: float | None = None
    network_factor: float = 1.0
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasured:
    """What one rank reported. None: not known."""

    tokens_per_s: float | None = None
    """While it computes; the median of the newest steps."""
    setting: MemorySetting | None = None
    memory_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What became of one attempt."""

    num_steps: int
    ranks: tuple[RankMeasured, ...]
    """In the order of ranks."""
    step_s: float | None = None
    network_s: float | None = None
    tokens_per_s: float | None = None
    total_s: float | None = None
    """Of an attempt that came to its end."""


Estimate = Callable[[GpuMemory, MemorySetting], int]
"""From a GPU and a setting to the bytes that torch is expected to count, without corrections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastComparison:
    """Forecast and measurement of one attempt, for a person."""

    forecast: Forecast
    measured: Measured | None = None


def learn(
    forecast: Forecast, measured: Measured, ended_s: float, estimate: Estimate
) -> dict[int, RunOutcome]:
    """Return what each GPU's rank teaches; nothing of an attempt that was too short.

    >>> rank = RankForecast(node="a", device="cuda:0", card="RTX 3090", tokens_per_s=1000.0,
    ...     speed_factor=0.5)
    >>> told = Forecast(mode="single", family="llama", adapter="lora", longest_tokens=512,
    ...     ranks=(rank,))
    >>> seen = Measured(num_steps=50, ranks=(RankMeasured(tokens_per_s=1100.0),))
    >>> learn(told, seen, 9.0, lambda gpu, setting: 0)[0].speed_ratio
    0.55
    """
    if measured.num_steps < LEAST_STEPS or len(measured.ranks) != len(forecast.ranks):
        return {}
    network_ratio = _network_ratio(forecast, measured)
    outcomes = {}
    for number, (told, seen) in enumerate(zip(forecast.ranks, measured.ranks, strict=True)):
        if told.card is None:
            continue
        outcome = RunOutcome(
            card=told.card,
            family=forecast.family,
            adapter=forecast.adapter,
            ended_s=ended_s,
            memory_ratio=_memory_ratio(told, seen, estimate),
            speed_ratio=_ratio(seen.tokens_per_s, told.tokens_per_s, told.speed_factor),
            network_ratio=network_ratio if number == 0 else None,
            is_calibrated=told.is_calibrated,
        )
        if (outcome.memory_ratio, outcome.speed_ratio, network_ratio) != (None, None, None):
            outcomes[number] = outcome
    return outcomes


def _memory_ratio(told: RankForecast, seen: RankMeasured, estimate: Estimate) -> float | None:
    if seen.memory_bytes is None or seen.setting is None or told.gpu is None:
        return None
    expected_bytes = estimate(told.gpu, seen.setting)
    return seen.memory_bytes / expected_bytes if expected_bytes > 0 else None


def _network_ratio(forecast: Forecast, measured: Measured) -> float | None:
    told, seen = forecast.network_s, measured.network_s
    if told is None or seen is None or min(told, seen) < _LEAST_NETWORK_S:
        return None
    return _ratio(seen, told, forecast.network_factor)


def _ratio(seen: float | None, told: float | None, factor: float) -> float | None:
    """Return measured over forecast, with the forecast's own correction taken out again."""
    if not seen or not told:
        return None
    return seen / (told / factor)


def error_of(told: float | None, seen: float | None) -> float | None:
    """Return how far a forecast was off: above 0 it was too high; None: not known.

    >>> error_of(11.0, 10.0), error_of(None, 10.0)
    (0.1, None)
    """
    return round(told / seen - 1.0, 6) if told is not None and seen else None


def median_of(values: Sequence[float]) -> float | None:
    """Return the middle value; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

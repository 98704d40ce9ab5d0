"""Compare the forecast of an attempt with its measurement, and learn from the difference.

Memory is compared for the setting that the trainer chose, speed while the GPU computes, and network
time by the shortest wait of any rank, since the other ranks also waited for that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.contract.model_cut import WeightTier
from agents.contract.spec import AdapterKind
from app.planning.accuracy.learning import RunOutcome
from app.planning.memory.forecast import MemorySetting
from app.planning.memory.gpu import GpuMemory

MIN_STEPS = 5
"""Minimum number of steps of an attempt to learn from: the first ones compile and warm up."""
# Modes in which every GPU holds the whole model.
_WHOLE_MODES = ("single", "data")
# Minimum wait per step to learn from, in seconds; shorter waits are noise.
_MIN_NETWORK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RankForecast:
    """Forecast for one rank."""

    node: str
    device: str
    card: str | None = None
    """Name of the GPU; None: a CPU."""
    share: float | None = None
    """Share of each batch, 0 to 1."""
    tokens_per_s: float | None = None
    """Speed while it computes, in tokens per second."""
    setting: MemorySetting | None = None
    gpu: GpuMemory | None = None
    """Input for forecasting the memory of another setting; None: a CPU."""
    allocated_bytes: int | None = None
    """Peak of allocated memory as torch counts it, in bytes."""
    low_bytes: int | None = None
    expected_bytes: int | None = None
    """Memory in use on the whole GPU, other programs included, in bytes."""
    high_bytes: int | None = None
    memory_parts: tuple[tuple[str, int], ...] = ()
    """Name and bytes, in the order of a stacked bar."""
    memory_factor: float = 1.0
    """Correction from past runs contained in `allocated_bytes`."""
    speed_factor: float = 1.0
    """Correction from past runs contained in `tokens_per_s`."""
    is_calibrated: bool = False
    """True if `tokens_per_s` is based on a calibration, not on the data sheet."""
    room_bytes: int | None = None
    """Memory of the GPU that may be in use, other programs included, in bytes."""
    layers: tuple[int, int] | None = None
    """First layer of its stage and the one after its last; None: it holds all layers."""
    replica: int = 0
    max_in_flight: int | None = None
    offloads: bool = False
    """True if inputs of its stage's recomputed layers are kept in the PC's RAM."""
    num_streamed: int = 0
    """Number of layers whose frozen weights are copied to the GPU for each pass."""
    streams_from: WeightTier | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Forecast for one attempt, as it is stored."""

    mode: str
    family: str
    adapter: AdapterKind
    longest_tokens: int
    ranks: tuple[RankForecast, ...]
    step_s: float | None = None
    network_s: float | None = None
    bubble_s: float | None = None
    """Time of a step in which a pipeline's slowest stage has no micro-batch, in seconds."""
    wire_s: float | None = None
    """Time of a step in which the busiest link carries bytes, in seconds; None: not computed."""
    tokens_per_s: float | None = None
    total_s: float | None = None
    energy_wh: float | None = None
    network_factor: float = 1.0
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasured:
    """Measurements that one rank reported; None: not known."""

    tokens_per_s: float | None = None
    """Speed while it computes, in tokens per second: the median of the newest steps."""
    setting: MemorySetting | None = None
    memory_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of one attempt."""

    num_steps: int
    ranks: tuple[RankMeasured, ...]
    """In the order of ranks."""
    step_s: float | None = None
    network_s: float | None = None
    tokens_per_s: float | None = None
    total_s: float | None = None
    """Duration of a finished attempt, in seconds; None: it did not finish."""


Estimate = Callable[[GpuMemory, MemorySetting], int]
"""Returns the bytes that torch is expected to count for a GPU and a setting, uncorrected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastComparison:
    """Forecast and measurement of one attempt, to be shown side by side."""

    forecast: Forecast
    measured: Measured | None = None


def learn(
    forecast: Forecast, measured: Measured, ended_s: float, estimate: Estimate
) -> dict[int, RunOutcome]:
    """Return an outcome for each rank on a GPU; none if the attempt was too short.

    >>> rank = RankForecast(node="a", device="cuda:0", card="RTX 3090", tokens_per_s=1000.0,
    ...     speed_factor=0.5)
    >>> forecast = Forecast(mode="single", family="llama", adapter="lora", longest_tokens=512,
    ...     ranks=(rank,))
    >>> seen = Measured(num_steps=50, ranks=(RankMeasured(tokens_per_s=1100.0),))
    >>> learn(forecast, seen, 9.0, lambda gpu, setting: 0)[0].speed_ratio
    0.55
    """
    if measured.num_steps < MIN_STEPS or len(measured.ranks) != len(forecast.ranks):
        return {}
    # Corrections are for a GPU that holds the whole model; a stage's figures say nothing about it.
    if forecast.mode not in _WHOLE_MODES:
        return {}
    network_ratio = _network_ratio(forecast, measured)
    outcomes = {}
    for number, (expected, seen) in enumerate(zip(forecast.ranks, measured.ranks, strict=True)):
        if expected.card is None:
            continue
        outcome = RunOutcome(
            card=expected.card,
            family=forecast.family,
            adapter=forecast.adapter,
            ended_s=ended_s,
            memory_ratio=_memory_ratio(expected, seen, estimate),
            speed_ratio=_ratio(seen.tokens_per_s, expected.tokens_per_s, expected.speed_factor),
            # Once per attempt: counted for each rank, large runs would outweigh small ones.
            network_ratio=network_ratio if number == 0 else None,
            is_calibrated=expected.is_calibrated,
        )
        if (outcome.memory_ratio, outcome.speed_ratio, network_ratio) != (None, None, None):
            outcomes[number] = outcome
    return outcomes


def _memory_ratio(expected: RankForecast, seen: RankMeasured, estimate: Estimate) -> float | None:
    if seen.memory_bytes is None or seen.setting is None or expected.gpu is None:
        return None
    # The stored forecast is corrected and may be for another setting than the trainer chose.
    expected_bytes = estimate(expected.gpu, seen.setting)
    return seen.memory_bytes / expected_bytes if expected_bytes > 0 else None


def _network_ratio(forecast: Forecast, measured: Measured) -> float | None:
    expected, seen = forecast.network_s, measured.network_s
    if expected is None or seen is None or min(expected, seen) < _MIN_NETWORK_S:
        return None  # a ratio of two tiny waits would be noise
    return _ratio(seen, expected, forecast.network_factor)


def _ratio(seen: float | None, expected: float | None, factor: float) -> float | None:
    """Return measured over uncorrected forecast."""
    if not seen or not expected:
        return None
    return seen / (expected / factor)


def error_of(expected: float | None, seen: float | None) -> float | None:
    """Return the relative error of a forecast, above 0 if it was too high; None: not known.

    >>> error_of(11.0, 10.0), error_of(None, 10.0)
    (0.1, None)
    """
    return round(expected / seen - 1.0, 6) if expected is not None and seen else None


def median_of(values: Sequence[float]) -> float | None:
    """Return the median; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

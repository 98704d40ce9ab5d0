"""Speed and memory in the journal's record of each step: the numbers that users watch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from agents.trainer.metrics.flops import ModelFlops
from agents.trainer.metrics.peaks import Peak
from agents.trainer.metrics.stopwatch import StepTimes
from agents.trainer.rank.device import read_memory_bytes, read_reserved_bytes

# Largest factor by which sending gradients slows computation.
_MOST_SLOWED = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Reference values for a run's speed; None if not known."""

    flops: ModelFlops
    peak: Peak | None
    solo_tokens_per_s: tuple[float, ...]
    """Tokens per second of each rank alone, measured before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Work of one rank in one step, and size of the whole batch."""

    lengths: tuple[int, ...]
    """Tokens of each segment of this rank."""
    num_targets: int
    global_tokens: int
    recomputed_share: float
    """Fraction of the layers that recomputed their activations, 0 to 1."""
    ranks_tokens: tuple[float, ...]
    """Tokens of each rank in the latest step known to all; 0 before one."""
    ranks_compute_s: tuple[float, ...]
    """Time that each rank computed for them, in seconds."""
    held_bytes: int
    """GPU memory held for replays, in bytes; see `cuda_graphs`."""
    unpacked_bytes: int
    """Free GPU memory used for unpacked 4-bit weights, in bytes."""


def describe_speed(
    work: StepWork, times: StepTimes, speeds: Speeds, device: torch.device
) -> dict[str, Any]:
    """Return the fields of a step's record on speed and memory.

    `mfu` is the model FLOPs of this rank over the maximum of its device in the whole step; `hfu`
    also counts recomputation. `eta` is the efficiency of the cluster: its tokens per second over
    the sum of its ranks' speeds alone, at most 1; see `_rates_alone`. `memory_bytes` is the peak
    that training needed; memory that is used only because it was free is a separate field.
    """
    # FLOPs of this rank alone, since different GPUs have different peaks.
    num_tokens = sum(work.lengths)
    model_flops = speeds.flops.count(work.lengths, work.num_targets)
    recomputed = speeds.flops.count_recomputed(work.lengths) * work.recomputed_share
    # Over the whole step, so that waiting lowers MFU, too.
    possible = speeds.peak.flops_per_s * times.step_s if speeds.peak else None
    rate = work.global_tokens / times.step_s
    if len(speeds.solo_tokens_per_s) == 1:
        alone = [num_tokens / times.compute_s]
    else:
        alone = _rates_alone(speeds.solo_tokens_per_s, work.ranks_tokens, work.ranks_compute_s)
    most_bytes = read_memory_bytes(device, work.held_bytes)
    return {
        **asdict(times),
        "tokens": num_tokens,
        "global_tokens": work.global_tokens,
        "tokens_per_s": num_tokens / times.step_s,
        "model_flops": model_flops,
        "mfu": model_flops / possible if possible else None,
        "hfu": (model_flops + recomputed) / possible if possible else None,
        "eta": min(1.0, rate / sum(alone)),
        "memory_bytes": None if most_bytes is None else most_bytes - work.unpacked_bytes,
        "memory_unpacked_bytes": work.unpacked_bytes,
        "memory_reserved_bytes": read_reserved_bytes(device),
    }


def _rates_alone(
    solo: tuple[float, ...], tokens: tuple[float, ...], compute_s: tuple[float, ...]
) -> list[float]:
    """Return the speed of each rank alone, in tokens per second.

    The step before shows the speed on rows of this run, without waits. The measurement before the
    first step may be faster, because sending gradients slows computation. It counts up to a limit,
    beyond which it must have measured other work. It is short and uses a cold card, so a step may
    be faster, too. A single rank sends nothing, and is compared only with its own step.

    >>> _rates_alone((100.0, 50.0, 900.0), (90.0, 60.0, 100.0), (1.0, 1.0, 1.0))
    [100.0, 60.0, 125.0]
    >>> _rates_alone((100.0, 50.0), (0.0, 0.0), (0.0, 0.0))
    [100.0, 50.0]
    """
    rates = []
    for measured, count, seconds in zip(solo, tokens, compute_s, strict=True):
        pace = count / seconds if seconds > 0 else 0.0
        rates.append(max(pace, min(measured, _MOST_SLOWED * pace)) if pace else measured)
    return rates

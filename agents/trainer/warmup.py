"""Measure how fast this rank trains, on the real model and real rows.

All ranks measure at the same time, so that ranks that share a PC feel each other. Nothing that the
training depends on is moved: gradients are zeroed at every step, and dropout draws from no stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from agents.trainer.compute import Computer
from agents.trainer.tokens import Sample

_LEAST_S = 0.2
_MOST_TRIES = 5
_LONG_S = 10.0


def measure_speed(computer: Computer, samples: Sequence[Sample], device: torch.device) -> float:
    """Return the tokens per second of forward and backward passes over `samples`.

    One untimed pass comes first (and is enough when it takes long). The fastest of the timed ones
    counts: other programs can only make a pass slower.
    """
    positions = list(range(len(samples)))
    num_tokens = sum(len(sample.ids) for sample in samples)
    first_s = _time_pass(computer, samples, positions, device)
    times_s = [first_s] if first_s > _LONG_S else []
    while sum(times_s) < _LEAST_S and len(times_s) < _MOST_TRIES:
        times_s.append(_time_pass(computer, samples, positions, device))
    return num_tokens / min(times_s)


def _time_pass(
    computer: Computer, samples: Sequence[Sample], positions: list[int], device: torch.device
) -> float:
    started = time.perf_counter()
    computer.add_gradients(samples, positions)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def choose_samples(samples: Sequence[Sample], max_tokens: int) -> list[Sample]:
    """Return the longest sample, and the first others as long as all have at most `max_tokens`."""
    chosen = [max(samples, key=lambda sample: len(sample.ids))]
    num_tokens = len(chosen[0].ids)
    for sample in samples:
        num_tokens += len(sample.ids)
        if num_tokens > max_tokens:
            break
        chosen.append(sample)
    return chosen

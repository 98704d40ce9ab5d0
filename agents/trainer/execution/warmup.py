"""Measure the training speed of this rank on the real model and real rows.

All ranks measure at the same time, so ranks that share a PC slow each other down as in training.
Measuring changes no state: gradients are zeroed at every step, and dropout uses no random stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from agents.trainer.data.examples import BatchPart
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.workload import count_tokens

# Total time of the timed passes after which measuring stops, in seconds.
_MIN_S = 0.2
_MAX_TRIES = 5
# A longer first pass is the measurement itself, in seconds.
_LONG_S = 10.0


def measure_speed(executor: Executor, parts: Sequence[BatchPart], device: torch.device) -> float:
    """Return the tokens per second of forward and backward passes over real steps.

    The fastest pass counts, because other programs can only make a pass slower.

    Args:
        executor: executor with its final setting.
        parts: steps of this rank, or parts of steps; only the first one if that takes long.
        device: device of the executor.
    """
    first_s = _time_pass(executor, parts[0], device)
    if first_s > _LONG_S:
        return count_tokens(parts[0]) / first_s
    # The first pass warms up; the second one records if passes are replayed.
    for _ in range(2 if executor.is_repeating else 1):
        for part in parts:
            _time_pass(executor, part, device)
    num_tokens = sum(map(count_tokens, parts))
    times_s: list[float] = []
    while sum(times_s) < _MIN_S and len(times_s) < _MAX_TRIES:
        times_s.append(sum(_time_pass(executor, part, device) for part in parts))
    return num_tokens / min(times_s)


def _time_pass(executor: Executor, part: BatchPart, device: torch.device) -> float:
    started = time.perf_counter()
    executor.add_gradients(part)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started

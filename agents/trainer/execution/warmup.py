"""Measure how fast this rank trains, on the real model and real rows.

All ranks measure at the same time, so that ranks that share a PC slow each other down as they will
in training. Measuring changes no state: gradients are zeroed at every step, and dropout uses no
random stream.
"""

from __future__ import annotations

import time

import torch

from agents.trainer.data.examples import Part
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.tuner import count_tokens

# Total time of the timed passes at which measuring stops, in seconds.
_MIN_S = 0.2
_MAX_TRIES = 5
# A first pass that takes longer is the measurement.
_LONG_S = 10.0


def measure_speed(executor: Executor, part: Part, device: torch.device) -> float:
    """Return the tokens per second of forward and backward passes over `part`.

    The first pass is a warm-up, unless it takes long. The fastest of the others counts, because
    other programs can only make a pass slower.
    """
    num_tokens = count_tokens(part)
    first_s = _time_pass(executor, part, device)
    times_s = [first_s] if first_s > _LONG_S else []
    while sum(times_s) < _MIN_S and len(times_s) < _MAX_TRIES:
        times_s.append(_time_pass(executor, part, device))
    return num_tokens / min(times_s)


def _time_pass(executor: Executor, part: Part, device: torch.device) -> float:
    started = time.perf_counter()
    executor.add_gradients(part)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started

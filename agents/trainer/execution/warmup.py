"""Measure how fast this rank trains, on the real model and real rows.

All ranks measure at the same time, so that ranks that share a PC feel each other. Nothing that the
training depends on is moved: gradients are zeroed at every step, and dropout draws from no stream.
"""

from __future__ import annotations

import time

import torch

from agents.trainer.data.examples import Part
from agents.trainer.execution.executor import Executor

_MIN_S = 0.2
_MAX_TRIES = 5
_LONG_S = 10.0


def measure_speed(executor: Executor, part: Part, device: torch.device) -> float:
    """Return the tokens per second of forward and backward passes over `part`.

    One untimed pass comes first (and is enough when it takes long). The fastest of the timed ones
    counts: other programs can only make a pass slower.
    """
    num_tokens = sum(example.num_tokens for example in part.examples)
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

"""Learning rate of a step: a pure function, so that a resume needs no scheduler state."""

from __future__ import annotations

import math

from agents.contract.spec import RunSpec


def learning_rate_at(spec: RunSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 1).

    It rises linearly over the warm-up steps and then decays towards 0, which it would reach one
    step after the last: no step has a learning rate of 0.
    """
    # From 1 to num_warmup, so that even the first step has a learning rate.
    num_warmup = round(spec.warmup_share * total_steps)
    if step <= num_warmup:
        return spec.learning_rate * step / num_warmup
    done = (step - num_warmup - 1) / max(1, total_steps - num_warmup)
    if spec.schedule == "constant":
        return spec.learning_rate
    if spec.schedule == "linear":
        return spec.learning_rate * (1 - done)
    return spec.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

"""Strategies by name: one row per value of `parallel` that this version trains."""

from __future__ import annotations

from collections.abc import Callable

from agents.contract.spec import RunSpec
from agents.trainer.parallel.data_parallel import DataParallel
from agents.trainer.parallel.pipeline.strategy import Pipeline
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.parallel.streamed import Streamed
from agents.trainer.rank.context import RankContext

# One GPU is data parallel with one rank. The plan resolves `auto` before the launch; without a
# plan, as under a manual torchrun, every rank holds the whole model.
STRATEGIES: dict[str, Callable[[RunSpec, RankContext], Strategy]] = {
    "auto": DataParallel,
    "single": DataParallel,
    "data": DataParallel,
    "pipeline": Pipeline,
    "streamed": Streamed,
}


def make_strategy(spec: RunSpec, context: RankContext) -> Strategy:
    """Return this rank's strategy: the one that the plan chose, else the one in the spec."""
    return STRATEGIES[context.attempt.intent.parallel](spec, context)

"""Which strategy a run file names: one row for each `parallel` that this version trains."""

from __future__ import annotations

from collections.abc import Callable

from agents.contract.spec import RunSpec
from agents.trainer.parallel.data_parallel import DataParallel
from agents.trainer.parallel.pipeline.strategy import Pipeline
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.parallel.streamed import Streamed
from agents.trainer.rank.context import RankContext

# One GPU is data parallel with one rank. The plan decides what `auto` means before the launch;
# where it has not, as under torchrun by hand, every rank holds the whole model.
STRATEGIES: dict[str, Callable[[RunSpec, RankContext], Strategy]] = {
    "auto": DataParallel,
    "single": DataParallel,
    "data": DataParallel,
    "pipeline": Pipeline,
    "streamed": Streamed,
}


def make_strategy(spec: RunSpec, context: RankContext) -> Strategy:
    """Return the strategy that the plan chose, else the one that the spec names, for this rank."""
    return STRATEGIES[context.attempt.intent.parallel](spec, context)

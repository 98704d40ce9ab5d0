"""The parallel modes that a plan compares, one row each.

A new mode is one file in this folder that proposes candidates, and one row of `PLANNED_MODES`. Its
label and traits are in agents/contract/parallel.py. A mode that the trainer cannot run yet is
computed and shown, but never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from agents.contract.model_cut import Stage
from agents.contract.parallel import PARALLEL, ParallelMode
from app.planning.candidate import Candidate, GpuPlan
from app.planning.choice import MARGIN, is_allowed, weigh
from app.planning.plan_context import Case, Worker
from app.planning.strategies import pipeline_plan, weight_streaming
from app.planning.strategies.data_parallel import propose_data, propose_single
from app.planning.strategies.sharded import gathering_s, propose_deepspeed, propose_sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedMode:
    """Planning of a mode in which a GPU may hold some of the layers only."""

    plan: Callable[[Case, tuple[Worker, ...]], Candidate | None]
    """Returns the plan over exactly these GPUs, or None if it is impossible."""
    refuse: Callable[[Case], str]
    """Returns why it does not train this run; empty: it may."""
    screen: Callable[[Case], Callable[[tuple[Worker, ...]], bool]]
    """Returns a quick test of whether a plan over some GPUs can fit."""
    make_stage: Callable[[Candidate, GpuPlan, int, int], Stage]
    """Returns a rank's stage, given the plan, its GPU, its rank and the number of layers."""
    refuse_gpus: Callable[[Case, int], str] = lambda case, num_gpus: ""
    """Returns why this number of GPUs does not train this run; empty: it may."""
    say_missing: Callable[[Case], str] = lambda case: ""
    """Returns what a run with this mode lacks; empty: a larger GPU or PC."""
    min_gpus: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMode:
    """Planning of one parallel mode."""

    propose: Callable[[Case, float], Iterable[Candidate]]
    """Returns the candidates worth comparing, in any order, given the seconds of a step that one
    has to beat to be chosen; the best of the mode is always among them."""
    max_shown: int = 3
    """Maximum number of its candidates that a plan lists."""
    needs_gpu: bool = False
    """True if it only saves GPU memory, which is pointless if a node trains on its CPU: then it is
    proposed only if the run file names it."""
    wire_s: Callable[[Case, Candidate], float] | None = None
    """Returns the seconds of a step in which the network is busy, to be shown instead of the time
    spent waiting; None: the waiting is shown."""
    divided: DividedMode | None = None
    """Division of the layers over GPUs; None: it does not divide them."""


PLANNED_MODES: dict[ParallelMode, PlannedMode] = {
    "single": PlannedMode(propose=propose_single),
    "data": PlannedMode(propose=propose_data),
    "pipeline": PlannedMode(
        propose=pipeline_plan.propose_pipeline,
        divided=DividedMode(
            plan=pipeline_plan.plan_pipeline,
            refuse=pipeline_plan.refuse_pipeline,
            screen=lambda case: partial(pipeline_plan.has_room, case),
            make_stage=pipeline_plan.make_pipeline_stage,
            refuse_gpus=pipeline_plan.refuse_stages,
            say_missing=pipeline_plan.say_missing_stages,
            min_gpus=2,
        ),
    ),
    "streamed": PlannedMode(
        propose=weight_streaming.propose_streamed,
        needs_gpu=True,
        divided=DividedMode(
            plan=weight_streaming.plan_streamed,
            refuse=weight_streaming.refuse_streamed,
            screen=weight_streaming.screen_streamed,
            make_stage=weight_streaming.make_streamed_stage,
        ),
    ),
    "sharded": PlannedMode(
        propose=propose_sharded, max_shown=1, needs_gpu=True, wire_s=gathering_s
    ),
    "deepspeed": PlannedMode(propose=propose_deepspeed, max_shown=1, needs_gpu=True),
}


def find_divided(parallel: str) -> DividedMode | None:
    """Return the division of a run file's mode; None: it does not divide the layers."""
    return next((row.divided for name, row in PLANNED_MODES.items() if name == parallel), None)


def propose_candidates(case: Case) -> list[Candidate]:
    """Return the candidates of every mode that applies to this case."""
    if not case.workers:
        return []
    has_cpu = any(worker.gpu.device == "cpu" for worker in case.workers)
    found: list[Candidate] = []
    for name, mode in PLANNED_MODES.items():
        if case.spec.parallel != name and mode.needs_gpu and has_cpu:
            continue
        bar_s = math.inf
        if case.spec.parallel == "auto":
            able = (one for one in found if one.fits and is_allowed(case.spec, case.cluster, one))
            bar_s = min(map(weigh, able), default=math.inf)
            bar_s /= (1 + MARGIN) ** PARALLEL[name].num_margins
        found += mode.propose(case, bar_s)
    return found

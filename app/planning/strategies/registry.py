"""The parallel modes that a plan compares, one row each.

A new mode is one file in this folder that proposes candidates, and one row of `PLANNED_MODES`.
Its label and whether the trainer can run it stand in agents/contract/parallel.py: a mode that
cannot be run yet is computed and shown, but never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agents.contract.parallel import ParallelMode
from app.planning.candidate import Candidate
from app.planning.plan_context import Case
from app.planning.strategies.data_parallel import propose_data, propose_single
from app.planning.strategies.pipeline_plan import propose_pipeline
from app.planning.strategies.sharded import gathering_s, propose_deepspeed, propose_sharded
from app.planning.strategies.weight_streaming import propose_streamed


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMode:
    """How one parallel mode is planned."""

    propose: Callable[[Case], Iterable[Candidate]]
    """Returns the candidates worth comparing, in any order."""
    max_shown: int = 3
    """Maximum number of its candidates that a plan lists."""
    needs_gpu: bool = False
    """Whether it only saves GPU memory, which makes it pointless where a node trains on its CPU:
    it is proposed there only if the run file names it."""
    wire_s: Callable[[Case, Candidate], float] | None = None
    """Returns the seconds of a step in which the network is busy, for modes in which that explains
    more than the seconds spent waiting; None: the waiting is what matters."""


PLANNED_MODES: dict[ParallelMode, PlannedMode] = {
    "single": PlannedMode(propose=propose_single),
    "data": PlannedMode(propose=propose_data),
    "pipeline": PlannedMode(propose=propose_pipeline),
    "streamed": PlannedMode(propose=propose_streamed, needs_gpu=True),
    "sharded": PlannedMode(
        propose=propose_sharded, max_shown=1, needs_gpu=True, wire_s=gathering_s
    ),
    "deepspeed": PlannedMode(propose=propose_deepspeed, max_shown=1, needs_gpu=True),
}


def propose_candidates(case: Case) -> list[Candidate]:
    """Return the candidates of every mode that applies to this case."""
    if not case.workers:
        return []
    has_cpu = any(worker.gpu.device == "cpu" for worker in case.workers)
    return [
        candidate
        for name, mode in PLANNED_MODES.items()
        if case.spec.parallel == name or not (mode.needs_gpu and has_cpu)
        for candidate in mode.propose(case)
    ]

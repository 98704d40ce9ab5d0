"""Find the fastest way to train that fits: `make_plan`. Pure, and quick enough to follow typing.

A mode that the trainer cannot run is computed and shown, and never chosen. Nodes that a run file
names are all used, and so is a mode that it names; `nodes: all` and `parallel: auto` leave the
choice to the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agents.contract.parallel import ParallelMode
from app.planning.advice import give_advice
from app.planning.build_context import open_case
from app.planning.candidate import Advice as Advice
from app.planning.candidate import Candidate as Candidate
from app.planning.candidate import DataSize as DataSize
from app.planning.candidate import GpuPlan as GpuPlan
from app.planning.candidate import Plan as Plan
from app.planning.candidate import PlanRequest as PlanRequest
from app.planning.candidate import StepParts as StepParts
from app.planning.plan_context import Case, Worker
from app.planning.reasons import explain
from app.planning.strategies.data_parallel import plan_data, plan_single
from app.planning.strategies.pipeline_plan import plan_pipeline
from app.planning.strategies.sharded import plan_sharded
from app.planning.strategies.weight_streaming import plan_streamed
from app.planning.subsets import choose_subsets, fastest_together

_FULLY_COMPUTED = 6
_SHOWN_OF_A_MODE = 3


def make_plan(question: PlanRequest) -> Plan:
    """Return the fastest plan that fits, the others with why they lost, and what would help."""
    case = open_case(question)
    found = sorted(find_candidates(case), key=lambda one: (not one.fits, one.step_s))
    chosen = choose(case, found)
    others = [explain(case, one, chosen) for one in _keep_best(case, found) if one is not chosen]
    if chosen is not None:
        chosen = explain(case, chosen, chosen)
    advice = give_advice(question, case, chosen, found)
    return Plan(chosen=chosen, others=tuple(others), advice=advice, assumptions=case.assumptions)


def find_candidates(case: Case) -> list[Candidate]:
    """Return the ways that are worth a look, of every mode."""
    if not case.workers:
        return []
    found = [plan_single(case, workers[0]) for workers in _by_node(case)]
    found += _data_plans(case)
    together = [case.of(names) for names in fastest_together(case)]
    found += _some(plan_pipeline(case, workers) for workers in _chains(case, together))
    if any(worker.gpu.device == "cpu" for worker in case.workers):
        return found  # the rest spares memory of GPUs
    found += _some(
        plan_streamed(case, workers) for workers in dict.fromkeys((together[0], together[-1]))
    )
    found += _some(
        plan_sharded(case, case.workers, stage=stage, mode=mode) for mode, stage in _SHARDED
    )
    return found


_SHARDED: tuple[tuple[ParallelMode, int], ...] = (
    ("sharded", 3),
    ("deepspeed", 1),
    ("deepspeed", 2),
    ("deepspeed", 3),
)


def choose(case: Case, found: list[Candidate]) -> Candidate | None:
    """Return the fastest that fits, that can be run, and that the spec allows; `found` is sorted.

    A PC alone is chosen over several only where it is faster; where both are equally fast, alone.
    """
    spec = case.spec
    names = {node.name for node in case.cluster.nodes}
    for one in found:
        if not (one.fits and one.runnable) or spec.parallel not in ("auto", one.mode):
            continue
        is_named = spec.nodes != "all" or spec.shares is not None
        if is_named and spec.parallel != "single" and set(one.nodes) != names:
            continue
        if spec.parallel == "single" and is_named and one.nodes[0] != case.cluster.nodes[0].name:
            continue
        return one
    return None


def _some(candidates: Iterable[Candidate | None]) -> list[Candidate]:
    return [one for one in candidates if one is not None]


def _by_node(case: Case) -> Iterator[tuple[Worker, ...]]:
    for node in case.cluster.nodes:
        workers = case.of((node.name,))
        if workers:
            yield workers


def _data_plans(case: Case) -> list[Candidate]:
    """Return the plan of all GPUs, and the best ones of fewer PCs."""
    chosen = [case.of(names) for names in choose_subsets(case, _FULLY_COMPUTED)]
    chosen = [some for some in chosen if 1 < len(some) < len(case.workers)]
    if len(case.workers) > 1:
        chosen.append(case.workers)
    return [plan_data(case, some) for some in chosen]


def _chains(case: Case, together: list[tuple[Worker, ...]]) -> Iterator[tuple[Worker, ...]]:
    """Yield the GPUs that a pipeline may use: all, and the fewest whose memory may do."""
    yield case.workers
    need = sum(case.fit(case.workers[0], 1).memory.parts[part] for part in _SPLIT_PARTS)
    for some in together:
        rooms = sum(case.room_bytes(worker) for worker in some)
        if len(some) < len(case.workers) and len(some) > 1 and rooms > 1.3 * need:
            yield some
            return


_SPLIT_PARTS = ("weights", "constants", "adapter", "gradients", "optimizer")


def _keep_best(case: Case, found: list[Candidate]) -> list[Candidate]:
    """Return the best few of each mode, the plan of all GPUs, and of plans alike one."""
    counts: dict[ParallelMode, int] = {}
    seen: set[tuple[object, ...]] = set()
    kept = []
    for one in found:
        alike = (one.mode, round(one.step_s, 6), *sorted(gpu.card for gpu in one.gpus))
        counts[one.mode] = counts.get(one.mode, 0) + (alike not in seen)
        most = 1 if one.mode in ("deepspeed", "sharded") else _SHOWN_OF_A_MODE
        is_asked = one.mode == "data" and len(one.gpus) == len(case.workers)
        if is_asked or (alike not in seen and counts[one.mode] <= most):
            kept.append(one)
        seen.add(alike)
    return kept

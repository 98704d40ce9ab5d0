"""Find the fastest candidate that fits: `make_plan`, quick enough to follow typing.

A mode that the trainer cannot run yet is computed and shown, but never chosen. A plan uses every PC
and the mode that the run file names; `nodes: all` and `parallel: auto` leave the choice to it (see
`choice`). A start executes it (see `document`).
"""

from __future__ import annotations

from agents.contract.parallel import PARALLEL, ParallelMode
from app.planning.advice.plan_advice import find_together, give_advice
from app.planning.advice.run_limits import list_limits
from app.planning.build_context import open_case
from app.planning.candidate import Advice as Advice
from app.planning.candidate import Candidate as Candidate
from app.planning.candidate import DataSize as DataSize
from app.planning.candidate import GpuPlan as GpuPlan
from app.planning.candidate import Plan as Plan
from app.planning.candidate import PlanRequest as PlanRequest
from app.planning.candidate import StepParts as StepParts
from app.planning.choice import choose, weigh
from app.planning.document import identify
from app.planning.hardware.cluster import ASSUMED_DISK_BYTES_PER_S, ASSUMED_PC_W
from app.planning.plan_context import Case
from app.planning.reasons import explain, name_nodes
from app.planning.refused import advise_full_gradients, advise_undoing, list_refused
from app.planning.shape.model_parts import list_parts, summarize
from app.planning.strategies.registry import PLANNED_MODES, propose_candidates


def make_plan(request: PlanRequest) -> Plan:
    """Return the fastest candidate that fits, the runners-up with reasons, and advice."""
    case = open_case(request)
    found = sorted(propose_candidates(case), key=lambda one: (not one.fits, one.step_s))
    chosen = choose(request.spec, case.cluster, found)
    others = [explain(case, one, chosen) for one in _keep_best(case, found) if one is not chosen]
    if chosen is None:
        # Without a plan, the nearest miss explains the most.
        others.sort(key=lambda one: _order_misfit(request, one))
    if chosen is not None:
        chosen = explain(case, chosen, chosen, _find_whole(found), find_together(case, found))
    refused = list_refused(request, case, chosen)
    undoing = (
        *advise_undoing(case, refused, chosen),
        *advise_full_gradients(request, case, chosen),
    )
    advice = give_advice(request, case, chosen, found)
    # With a named mode, the reason comes first, before its remedy.
    is_free = request.spec.parallel == "auto"
    advice = (*undoing, *advice) if is_free else (*advice, *undoing)
    return Plan(
        refused=refused,
        id=identify(chosen) if chosen is not None else "",
        chosen=chosen,
        others=tuple(others),
        advice=advice,
        assumptions=(*case.assumptions, *_disk_notes(case, chosen), *_power_notes(case, chosen)),
        parts=list_parts(request.shape, request.spec),
        limits=list_limits(request, case),
        model=summarize(request.shape),
    )


def _order_misfit(request: PlanRequest, one: Candidate) -> tuple[bool, bool, bool, float]:
    """Return a sort key for candidates if no candidate is chosen; the nearest to fitting first."""
    # The mode of the run file comes first: the user wants to know why it does not fit.
    is_other = request.spec.parallel not in ("auto", one.mode)
    worst = max(gpu.memory.expected_bytes / gpu.room_bytes for gpu in one.gpus)
    return is_other, not one.fits, not one.runnable, weigh(one) if one.fits else worst


def _find_whole(found: list[Candidate]) -> Candidate | None:
    """Return the fastest runnable candidate whose GPUs hold the whole model, or None."""
    whole = (one for one in found if one.fits and one.runnable and not one.divides_layers)
    return next(whole, None)


def _disk_notes(case: Case, chosen: Candidate | None) -> list[str]:
    """Return the assumption about unmeasured SSDs from which the chosen plan streams weights."""
    if chosen is None:
        return []
    reading = {gpu.node for gpu in chosen.gpus if gpu.streams_from == "disk"}
    unknown = [
        node.name
        for node in case.cluster.nodes
        if node.name in reading and node.disk_bytes_per_s is None
    ]
    if not unknown:
        return []
    rate = ASSUMED_DISK_BYTES_PER_S / 1e9
    who = name_nodes(tuple(unknown))
    return [f"{who}: the SSD is assumed to read {rate:g} GB/s until it is measured"]


def _power_notes(case: Case, chosen: Candidate | None) -> list[str]:
    """Return the assumption about PCs whose own power is not known."""
    if chosen is None or chosen.pc_energy_wh is None:
        return []
    unknown = [n.name for n in case.cluster.nodes if n.name in chosen.nodes and n.pc_w is None]
    if not unknown:
        return []
    draws = "draws" if len(unknown) == 1 else "each draw"
    return [f"{name_nodes(tuple(unknown))} {draws} {ASSUMED_PC_W:g} W without the GPUs"]


def _keep_best(case: Case, found: list[Candidate]) -> list[Candidate]:
    """Return the best candidates of each mode and the plan of all GPUs, without duplicates."""
    counts: dict[ParallelMode, int] = {}
    seen: set[tuple[object, ...]] = set()
    kept = []
    for one in found:
        # Equal cards in other PCs give an equivalent plan; one of them is enough.
        alike = (one.mode, round(one.step_s, 6), *sorted(gpu.card for gpu in one.gpus))
        counts[one.mode] = counts.get(one.mode, 0) + (alike not in seen)
        most = PLANNED_MODES[one.mode].max_shown
        # The plan of all GPUs is always shown: users expect it, and the reason why it lost.
        mode = PARALLEL[one.mode]
        is_started = mode.runnable and not mode.uses_one_gpu
        is_asked = is_started and len(one.gpus) == len(case.workers)
        if is_asked or (alike not in seen and counts[one.mode] <= most):
            kept.append(one)
        seen.add(alike)
    return kept

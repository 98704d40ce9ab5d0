"""Find the GPUs on which layers are not compiled, and the cost of that.

Passes of such layers are not replayed either. The cost compares two forecasts of the same GPU, with
and without compiled layers, each with the setting that the trainer would choose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from app.planning.build_context import make_worker
from app.planning.candidate import PlanRequest, RunLimit
from app.planning.memory.gpu import COMPILED_CAPABILITY, is_compiled
from app.planning.plan_context import Case, Worker

Reason = Literal["no_compiler", "old_card", "turned_off"]


def list_limits(request: PlanRequest, case: Case) -> tuple[RunLimit, ...]:
    """Return the GPUs whose layers are not compiled; equal cards with one reason are one entry."""
    found: dict[tuple[str, Reason], RunLimit] = {}
    for worker in case.workers:
        if worker.gpu.device == "cpu" or is_compiled(case.spec, worker.memory):
            continue
        key = (worker.gpu.name, _find_reason(case, worker))
        known = found.get(key)
        if known is None:
            found[key] = _make_limit(request, case, worker, key[1])
        elif worker.node.name not in known.nodes:
            found[key] = replace(known, nodes=(*known.nodes, worker.node.name))
    return tuple(found.values())


def _find_reason(case: Case, worker: Worker) -> Reason:
    if case.spec.compile != "auto":
        return "turned_off"
    return "old_card" if worker.memory.capability < COMPILED_CAPABILITY else "no_compiler"


def _make_limit(request: PlanRequest, case: Case, worker: Worker, reason: Reason) -> RunLimit:
    """Compare a GPU with itself with compiled layers."""
    # Both obstacles are removed in the copy: the node gets a compiler, the card the capability.
    spec = replace(case.spec, compile="auto")
    memory = replace(worker.memory, capability=max(worker.memory.capability, COMPILED_CAPABILITY))
    other = make_worker(
        replace(request, spec=spec),
        replace(worker.node, has_compiler=True),
        worker.gpu,
        memory,
        case.work,
    )
    compiled = replace(case, spec=spec, workers=(other,), fits={})
    now, then = case.fit(worker, 1), compiled.fit(other, 1)
    ratio = None
    if now.fits and then.fits:
        ratio = compiled.speed(other, then, 1) / case.speed(worker, now, 1)
    return RunLimit(
        reason=reason,
        nodes=(worker.node.name,),
        card=worker.gpu.name,
        time_ratio=ratio,
        is_decisive=then.fits and not now.fits,
    )

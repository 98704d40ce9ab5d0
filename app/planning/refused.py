"""Name the modes that a key of the run file forbids, with their forecast once the key is undone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agents.contract.parallel import PARALLEL, ParallelMode, refuse_trained_weights
from agents.contract.spec import RunSpec
from app.planning.advice.changes import apply_change
from app.planning.build_context import open_case
from app.planning.candidate import Advice, Candidate, PlanRequest, RefusedMode
from app.planning.choice import MARGIN, choose, weigh
from app.planning.plan_context import Case
from app.planning.reasons import describe_candidate
from app.planning.strategies.pipeline_plan import refuse_pipeline
from app.planning.strategies.registry import PLANNED_MODES, propose_candidates
from app.text import show_duration

# Time of a step from which a change is advised, as a share of the chosen plan's.
_MIN_GAIN = 0.95
# Changes of keys that undo a refusal, by key; the values of a mode's needs come from its row.
_UNDONE: dict[str, Any] = {"shares": None, "adapter.targets": "all-linear"}


def list_refused(
    request: PlanRequest, case: Case, chosen: Candidate | None
) -> tuple[RefusedMode, ...]:
    """Return the trained modes that the run file rules out by another key than `parallel`."""
    found = []
    for mode, row in PARALLEL.items():
        is_wanted = case.spec.parallel in ("auto", mode)
        if not row.runnable or not is_wanted or not case.workers:
            continue
        refusals = dict(_list_refusals(case, mode))
        if refusals:
            found.append(_describe(request, case, mode, refusals, chosen))
    return tuple(found)


def advise_undoing(
    case: Case, refused: Sequence[RefusedMode], chosen: Candidate | None
) -> Iterator[Advice]:
    """Yield advice to undo each refusal that keeps the run from fitting or from being faster."""
    for one in refused:
        would = one.would
        if would is None or not would.fits or not one.change:
            continue
        if chosen is None:
            gain = "it then fits as"
        elif weigh(would) < weigh(chosen):
            gain = f"a step then takes {chosen.step_s / would.step_s:.1f} times less time, as"
        else:
            continue
        change = f"{_show_change(one.change)}: {gain} {describe_candidate(case, would)}"
        yield Advice(text=change, change=one.change)


def advise_full_gradients(
    request: PlanRequest, case: Case, chosen: Candidate | None
) -> Iterator[Advice]:
    """Yield advice to send gradients in full if compression costs more than it saves."""
    if case.spec.compression == "none" or len(case.workers) < 2:
        return
    change = {"compression": "none"}
    changed = open_case(replace(request, spec=apply_change(request.spec, change)))
    best = choose(changed.spec, changed.cluster, propose_candidates(changed))
    if best is None or (chosen is not None and weigh(best) > _MIN_GAIN * weigh(chosen)):
        return
    ratio = f"{chosen.step_s / best.step_s:.1f} times as fast" if chosen is not None else "it fits"
    yield Advice(
        text=f"{_show_change(change)}: {ratio}, as {describe_candidate(changed, best)}, since "
        "compressed gradients need buffers on each GPU",
        change=change,
    )


def _list_refusals(case: Case, mode: ParallelMode) -> Iterator[tuple[str, str]]:
    """Yield each key that forbids a mode, with the reason as a clause."""
    spec, row = case.spec, PARALLEL[mode]
    for need in row.needs:
        if _read(spec, need.key) not in need.values:
            yield need.key, f"it needs {' or '.join(need.values)}{need.reason}"
    if refuse_trained_weights(mode, spec.adapter.kind) is not None:
        yield "adapter.kind", f"it {row.frozen_only}, and full training has none"
    has_cpu = any(worker.gpu.device == "cpu" for worker in case.workers)
    if has_cpu and PLANNED_MODES[mode].needs_gpu and spec.parallel != mode:
        yield "nodes", "a CPU takes part, whose memory is the RAM that would hold the rest"
    if not row.has_stages or len(case.workers) < 2:
        return
    if spec.shares is not None:
        yield "shares", "each stage computes every row"
    refusal = refuse_pipeline(replace(case, spec=_fulfil(spec, mode)))
    if refusal:
        key = "adapter.targets" if "adapter.targets" in refusal else "model"
        yield key, refusal[0].lower() + refusal[1:]


def _fulfil(spec: RunSpec, mode: ParallelMode) -> RunSpec:
    """Return the spec with the needs of a mode, so that only its model can be refused."""
    change = {
        need.key: need.values[0]
        for need in PARALLEL[mode].needs
        if _read(spec, need.key) not in need.values
    }
    return apply_change(spec, {**change, "shares": None})


def _describe(
    request: PlanRequest,
    case: Case,
    mode: ParallelMode,
    refusals: dict[str, str],
    chosen: Candidate | None,
) -> RefusedMode:
    needs = {need.key: need.values[0] for need in PARALLEL[mode].needs}
    undone = {"adapter.kind": "qlora", **needs, **_UNDONE}
    can_undo = all(key in undone for key in refusals)
    change = {key: undone[key] for key in refusals} if can_undo else {}
    would = _forecast(request, mode, change, chosen) if change else None
    label = PARALLEL[mode].label
    why = " and ".join(
        f"{key}: {_show(_read(case.spec, key))} forbids it, since {text}"
        if key not in ("model", "nodes")
        else f"{key} forbids it: {text}"
        for key, text in refusals.items()
    )
    parts = [f"{label}: {why}"]
    if would is not None:
        pace = f"{show_duration(would.step_s)} a step, {would.tokens_per_s:,.0f} tokens/s"
        result = pace if would.fits else "it would not fit"
        parts.append(f"{_show_change(change)}: {result}")
    return RefusedMode(
        mode=mode, keys=tuple(refusals), text="; ".join(parts), would=would, change=change
    )


def _forecast(
    request: PlanRequest, mode: ParallelMode, change: dict[str, Any], chosen: Candidate | None
) -> Candidate | None:
    """Return the best plan of a mode once the change is made, or None."""
    changed = open_case(replace(request, spec=apply_change(request.spec, change)))
    bar_s = math.inf
    if chosen is not None:
        bar_s = weigh(chosen) / (1 + MARGIN) ** PARALLEL[mode].num_margins
    found = sorted(
        PLANNED_MODES[mode].propose(changed, bar_s), key=lambda one: (not one.fits, one.step_s)
    )
    return choose(changed.spec, changed.cluster, found) or next(iter(found), None)


def _read(spec: RunSpec, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(spec, section) if section else spec, name)


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _show_change(change: Mapping[str, object]) -> str:
    parts = [
        f"without {key}" if value is None else f"with {key}: {value}"
        for key, value in change.items()
    ]
    text = " and ".join(parts)
    return text[0].upper() + text[1:]

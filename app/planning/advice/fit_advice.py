"""Advise the smallest changes of a run file that make a run fit, or state what it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agents.contract.parallel import PARALLEL, find_mode
from app.planning.advice.changes import Change, apply_change, list_changes
from app.planning.build_context import open_case
from app.planning.candidate import Advice, Candidate, GpuPlan, PlanRequest
from app.planning.choice import find_least
from app.planning.memory.forecast import GIB
from app.planning.plan_context import Case, Worker
from app.planning.reasons import describe_candidate, name_nodes, name_places
from app.planning.strategies.data_parallel import propose_data
from app.planning.strategies.registry import PLANNED_MODES, DividedMode, find_divided
from app.planning.subsets import fastest_together

# A change with its description; None: no change of this kind.
_Choice = tuple[Change, str] | None


def advise_fit(
    request: PlanRequest, case: Case, chosen: Candidate | None, found: Sequence[Candidate]
) -> Iterator[Advice]:
    """Yield advice that makes the run fit on the largest card, or on all cards if it needs all."""
    # A run that names its nodes needs all of them; otherwise one card that fits is enough.
    is_whole = request.spec.nodes != "all" and not find_mode(request.spec.parallel).uses_one_gpu
    num_needed = len(case.workers) if chosen is not None or is_whole else 1
    # If the run fits somewhere, modes that divide the model fit too and need no change.
    only_whole = chosen is not None
    divided = find_divided(request.spec.parallel)
    if refusal := divided.refuse(case) if divided is not None else "":
        yield Advice(text=refusal)
    offers = list(_list_offers(request, num_needed, only_whole))
    other = None if chosen is not None else _offer_other_mode(request, case, found)
    yield from offers
    if other is not None:
        yield other
    if not offers and chosen is None and other is None and not refusal:
        yield from _nothing_fits(request, case, found)


def _offer_other_mode(
    request: PlanRequest, case: Case, found: Sequence[Candidate]
) -> Advice | None:
    """Return advice to use a candidate that fits but that the run file excludes, or None."""
    best = find_least(candidate for candidate in found if candidate.fits and candidate.runnable)
    if best is None:
        return None
    change: Change = {} if request.spec.parallel in ("auto", best.mode) else {"parallel": best.mode}
    if len(best.gpus) < len(case.workers) and request.spec.nodes != "all":
        change["nodes"] = name_places(case, best)
    how = f", with parallel: {best.mode}" if "parallel" in change else ""
    return Advice(text=f"It fits as {describe_candidate(case, best)}{how}", change=change)


def _list_offers(request: PlanRequest, num_needed: int, only_whole: bool) -> Iterator[Advice]:
    """Yield the smallest change of each kind that makes the run fit, else one of several kinds.

    The user chooses between them, since the cost in time and quality differs from run to run.
    """
    kinds = _list_kinds(request)
    # A mode may support one optimizer only: changing it could keep the run from fitting.
    no_other = [changes for changes in kinds if not changes or "optimizer" not in changes[0][0]]
    enough = None
    # The strongest change of each kind together shows whether any combination fits.
    for some in (no_other, kinds):
        strongest: list[_Choice] = [changes[-1] if changes else None for changes in some]
        if _offer_together(request, strongest, num_needed, only_whole) is not None:
            enough = some
            break
    if enough is None:
        return  # if all changes together are not enough, no single one is
    found = False
    for changes in kinds:
        offers = (_offer(request, one, num_needed, only_whole) for one in changes)
        offer = next((one for one in offers if one is not None), None)
        if offer is not None:
            found = True
            yield offer
    if not found:
        yield from _find_smallest(request, enough, strongest, num_needed, only_whole)


def _list_kinds(request: PlanRequest) -> list[list[tuple[Change, str]]]:
    """Return the changes that may make a run fit; see `list_changes`."""
    spec, longest_tokens = request.spec, request.data.longest_tokens
    return list_changes(spec, longest_tokens or spec.sequence_tokens)


def _find_smallest(
    request: PlanRequest,
    kinds: Sequence[Sequence[tuple[Change, str]]],
    strongest: Sequence[_Choice],
    num_needed: int,
    only_whole: bool,
) -> Iterator[Advice]:
    """Yield a combination in which every change is needed; the costliest is weakened first."""
    chosen, best = list(strongest), None
    for place in reversed(range(len(kinds))):
        for weaker in (None, *kinds[place]):
            tried = [*chosen[:place], weaker, *chosen[place + 1 :]]
            offer = _offer_together(request, tried, num_needed, only_whole)
            if offer is not None:
                chosen, best = tried, offer
                break
    if best is not None:
        yield best


def _offer_together(
    request: PlanRequest, chosen: Sequence[_Choice], num_needed: int, only_whole: bool
) -> Advice | None:
    """Return advice to make several changes; None: no change, or it fits on too few cards."""
    both: Change = {}
    words: list[str] = []
    for choice in chosen:
        if choice is not None:
            both |= choice[0]
            words.append(_within(choice[1], words))
    if not both:
        return None
    return _offer(request, (both, " and ".join(words)), num_needed, only_whole)


def _within(text: str, words: list[str]) -> str:
    """Return a description in lower case if others precede it in the sentence."""
    return text[0].lower() + text[1:] if words else text


def _offer(
    request: PlanRequest, one: tuple[Change, str], num_needed: int, only_whole: bool
) -> Advice | None:
    """Return advice with the memory that the changed run needs; None: it fits on too few cards."""
    change, words = one
    changed = open_case(replace(request, spec=apply_change(request.spec, change)))
    if find_divided(request.spec.parallel) is None:
        whole = _offer_whole(changed, words, change, num_needed)
        if whole is not None:
            return whole
    divided = None if only_whole else _fit_divided(changed, num_needed)
    if divided is None:
        return None
    where = describe_candidate(changed, divided)
    if len(divided.gpus) < len(changed.workers):
        change = {**change, "nodes": name_places(changed, divided)}
        words = f"{words}, and use {name_nodes(divided.nodes)} alone"
    return Advice(text=f"{words}: it then fits, {where}", change=change)


def _fit_divided(case: Case, num_needed: int) -> Candidate | None:
    """Return the fastest plan that fits and divides the model, or None.

    It uses all GPUs, or if fewer are enough as many of the fastest nodes as possible.
    """
    able = [one for one in _list_divided(case) if not one.refuse(case)]
    groups = [case.team(case.workers)]
    if num_needed < len(case.workers):
        groups += list(fastest_together(case))[-2::-1]
    # The screening is cheap and shared by all groups; a full plan takes milliseconds.
    screened = [(mode.plan, mode.screen(case)) for mode in able]
    for workers in groups:
        found = [plan(case, workers) for plan, may_fit in screened if may_fit(workers)]
        fitting = [plan for plan in found if plan is not None and plan.fits]
        if fitting:
            return min(fitting, key=lambda one: one.step_s)
    return None


def _list_divided(case: Case) -> list[DividedMode]:
    """Return the runnable modes that divide the layers and that the run file allows."""
    return [
        mode.divided
        for name, mode in PLANNED_MODES.items()
        if mode.divided is not None
        and case.spec.parallel in ("auto", name)
        and PARALLEL[name].runnable
    ]


def _offer_whole(changed: Case, words: str, change: Change, num_needed: int) -> Advice | None:
    """Return advice for a run whose GPUs each hold the whole model; None: too few of them can."""
    # `may_fit` forecasts only the smallest setting; `fit` searches all and takes milliseconds.
    able = [worker for worker in changed.workers if changed.may_fit(worker)]
    if len(able) < num_needed:
        return None
    able = [worker for worker in able if changed.fit(worker, 1).fits]
    if len(able) < num_needed or not _is_shared(changed, num_needed):
        return None
    where = name_nodes(tuple(dict.fromkeys(worker.node.name for worker in able)))
    fullest = min(able, key=lambda worker: _count_free(changed, worker))
    fit = changed.fit(fullest, 1)
    needed, room = fit.memory.expected_bytes / GIB, fit.room_bytes / GIB
    return Advice(
        text=f"{words}: it then fits on {where}, with {needed:.1f} of {room:.1f} GiB", change=change
    )


def _is_shared(case: Case, num_needed: int) -> bool:
    """Return whether enough GPUs train together if the run file demands shared batches."""
    if not find_mode(case.spec.parallel).copies_model or len(case.workers) == 1:
        return True
    return any(
        candidate.fits and len(candidate.gpus) >= num_needed
        for candidate in propose_data(case, math.inf)
    )


def _count_free(case: Case, worker: Worker) -> float:
    """Return the bytes of a card that the run leaves free."""
    fit = case.fit(worker, 1)
    return fit.room_bytes - fit.memory.expected_bytes


def _nothing_fits(request: PlanRequest, case: Case, found: Sequence[Candidate]) -> Iterator[Advice]:
    """Yield advice on what the smallest run would need, and on modes of later versions."""
    later = next((candidate for candidate in found if candidate.fits), None)
    if later is not None:
        description = describe_candidate(case, later)
        yield Advice(text=f"It would fit as {description}, which this version cannot train yet")
    change: Change = {}
    for changes in _list_kinds(request):
        for strongest, _ in changes[-1:]:
            change |= strongest
    smallest = open_case(replace(request, spec=apply_change(request.spec, change)))
    divided = find_divided(smallest.spec.parallel)
    if divided is not None and len(smallest.workers) < divided.min_gpus:
        label = find_mode(smallest.spec.parallel).label
        text = f"A {label} needs two GPUs or more: add a node, or use parallel: auto"
        yield Advice(text=text)
        return
    needs = divided.say_missing(smallest) if divided is not None else ""
    if not needs:
        largest_first = sorted(smallest.workers, key=_room_bytes, reverse=True)
        # The largest GPU may have enough where one that has to take part lacks something.
        every = (_describe_needs(smallest, worker) for worker in largest_first)
        needs = next((one for one in every if one), "it needs more than these PCs have together")
    yield Advice(
        text=f"No change of the run file makes it fit: with all of them together {needs}, or a "
        "smaller model"
    )


def _room_bytes(worker: Worker) -> int:
    return worker.memory.room_bytes - worker.gpu.desktop_bytes


def _describe_needs(smallest: Case, best: Worker) -> str:
    """Return the GPU memory and RAM that a run needs beyond a card, as a clause; empty: nothing."""
    # Ranks that copy the model also need memory for the exchange of gradients.
    copies = find_mode(smallest.spec.parallel).copies_model
    ranks = len(smallest.workers) if copies else 1
    whole = smallest.fit(best, ranks).memory
    alone = (one.plan(smallest, (best,)) for one in _list_divided(smallest) if one.min_gpus == 1)
    gpu = next((plan.gpus[0] for plan in alone if plan is not None), None)
    # Name the smaller need: the whole model on the card, or a part with the rest in RAM.
    if gpu is None or gpu.memory.expected_bytes >= whole.expected_bytes:
        return f"it needs {_describe_card(whole.expected_bytes - whole.desktop_bytes)}"
    needs = []
    if gpu.memory.expected_bytes > gpu.room_bytes:
        needs.append(_describe_card(gpu.memory.expected_bytes - gpu.memory.desktop_bytes))
    if not gpu.fits_host:
        needs.append(_describe_ram(gpu, best))
    return f"it needs {' and '.join(needs)}" if needs else ""


def _describe_card(num_bytes: float) -> str:
    return f"a card with {num_bytes / GIB:.1f} GiB free"


def _describe_ram(gpu: GpuPlan, worker: Worker) -> str:
    needed = f"{gpu.host_bytes / GIB:.1f} GiB of RAM for training"
    if worker.node.ram_bytes is None:
        return f"{needed} on {gpu.node}, whose RAM is not known (ram_gib of a cluster file)"
    room = (gpu.host_room_bytes or 0) / GIB
    why = worker.node.why_little_ram if worker.node.ram_limit else ""
    return f"{needed} on {gpu.node}, which has {room:.1f} to spare{why}"

"""Advise changes of a run file: the smallest one that makes a run fit, or one that is faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agents.contract.parallel import PARALLEL
from agents.contract.spec import MOST, RunSpec
from app.planning.build_context import open_case
from app.planning.candidate import CUT_MODES, Advice, Candidate, PlanRequest
from app.planning.choice import find_least
from app.planning.memory.forecast import GIB
from app.planning.plan_context import Case, Worker
from app.planning.reasons import describe_candidate, name_nodes
from app.planning.strategies.data_parallel import split_rows
from app.planning.strategies.pipeline_plan import plan_pipeline
from app.planning.strategies.registry import propose_candidates
from app.planning.strategies.weight_streaming import plan_streamed
from app.planning.subsets import fastest_together

# Minimum speed-up that justifies leaving nodes out or changing the batch, as a ratio.
_MIN_GAIN = 1.05
Change = dict[str, Any]
# Plans over all GPUs of the modes in which GPUs hold parts of the model.
_PLANS = {"pipeline": plan_pipeline, "streamed": plan_streamed}
# Share of a step spent waiting for the network from which compression is advised.
_SLOW_NETWORK = 0.1
# Shortest sequence that is advised, in tokens: shorter ones cut most chats.
_MIN_TOKENS = 256
# Lowest rank that is advised.
_MIN_RANK = 8
_OPTIMIZER_WORDS = {
    "adamw_8bit": "Use the 8-bit optimizer",
    "paged_adamw_8bit": "Use the paged 8-bit optimizer",
}
# Minimum gain from which another batch size is advised, as a share of tokens per second.
_MIN_BATCH_GAIN = 0.08
# Minimum gain from which weights in 4 bits are advised to a run that streams them, as a ratio.
_MIN_4_BIT_GAIN = 1.5
# Maximum number of sequences by which the advised batch exceeds the requested one.
_MAX_EXTRA_ROWS = 16


def give_advice(
    request: PlanRequest, case: Case, chosen: Candidate | None, found: Sequence[Candidate]
) -> tuple[Advice, ...]:
    """Return the advice for a plan, the most important first."""
    if not case.workers:
        return (
            Advice(text="No node has a GPU whose memory is known: add a node, or describe one"),
        )
    together = _together(case, found)
    advice: list[Advice] = []
    if chosen is None or (
        chosen.mode not in CUT_MODES and together is not None and not together.fits
    ):
        advice += _make_fit(request, case, chosen, found)
    if chosen is not None:
        advice += _fewer_nodes(case, chosen, found)
        advice += _fill_batch(case, chosen, together)
        advice += _compress(request, chosen)
        advice += _hold_in_4_bits(request, chosen)
    return tuple(advice)


def _together(case: Case, found: Sequence[Candidate]) -> Candidate | None:
    """Return the plan that uses all GPUs; None: it was not computed."""
    mode = "data" if len(case.workers) > 1 else "single"
    return next((o for o in found if o.mode == mode and len(o.gpus) == len(case.workers)), None)


# ---------------------------------------------------------------- a run that does not fit


def _make_fit(
    request: PlanRequest, case: Case, chosen: Candidate | None, found: Sequence[Candidate]
) -> Iterator[Advice]:
    """Advise what makes the run fit on the largest card, or on all of them."""
    names = tuple(node.name for node in case.cluster.nodes)
    misfits = tuple(name for name in names if not _fits_on(case, name))
    if chosen is not None and misfits:
        it = "it" if len(misfits) == 1 else "them"
        yield Advice(
            text=f"It does not fit on {name_nodes(misfits)}: leave {it} out",
            change={"nodes": chosen.nodes},
        )
    # A run that names its nodes needs all of them; otherwise one card that fits is enough.
    is_whole = request.spec.nodes != "all" and request.spec.parallel != "single"
    num_needed = len(case.workers) if chosen is not None or is_whole else 1
    # Where a run fits, so do the ways that divide the model, without a change.
    only_whole = chosen is not None
    offers = [offer for offer in _list_offers(request, num_needed, only_whole) if offer is not None]
    other = None if chosen is not None else _offer_other_way(request, case, found)
    yield from offers
    if other is not None:
        yield other
    if not offers and chosen is None and other is None:
        yield from _nothing_fits(request, case, found)


def _offer_other_way(request: PlanRequest, case: Case, found: Sequence[Candidate]) -> Advice | None:
    """Return advice to train in a way that fits and that the run file excludes; None: none does."""
    one = find_least(one for one in found if one.fits and one.runnable)
    if one is None:
        return None
    change: Change = {} if request.spec.parallel in ("auto", one.mode) else {"parallel": one.mode}
    if len(one.gpus) < len(case.workers):
        change["nodes"] = one.nodes
    how = f", with parallel: {one.mode}" if "parallel" in change else ""
    return Advice(text=f"It fits as {describe_candidate(case, one)}{how}", change=change)


def _list_offers(
    request: PlanRequest, num_needed: int, only_whole: bool
) -> Iterator[Advice | None]:
    """Yield changes that make the run fit, each the smallest of its kind; then all kinds together.

    A person has to choose between them: what costs nothing, what costs time, and what costs
    quality differ from run to run.
    """
    found = False
    kinds = _list_kinds(request)
    for changes in kinds:
        offers = (_offer(request, one, num_needed, only_whole) for one in changes)
        offer = next((one for one in offers if one is not None), None)
        found = found or offer is not None
        yield offer
    if found:
        return
    together: Change = {}
    words: list[str] = []
    for changes in kinds:
        strongest = changes[-1:]
        # Of shorter sequences the longest that suffices beside all other changes.
        for change, said in changes if changes is kinds[-1] else strongest:
            both = {**together, **change}
            tried = (both, " and ".join([*words, _within(said, words)]))
            offer = _offer(request, tried, num_needed, only_whole)
            if offer is not None:
                yield offer
                return
        for change, said in strongest:
            together |= change
            words.append(_within(said, words))


def _within(said: str, words: list[str]) -> str:
    """Return words as they stand in a sentence behind others."""
    return said[0].lower() + said[1:] if words else said


def _offer(
    request: PlanRequest, one: tuple[Change, str], num_needed: int, only_whole: bool
) -> Advice | None:
    """Return advice with what a changed run needs; None: it fits on too few cards."""
    change, words = one
    changed = open_case(replace(request, spec=apply_change(request.spec, change)))
    if request.spec.parallel not in CUT_MODES:
        whole = _offer_whole(changed, words, change, num_needed)
        if whole is not None:
            return whole
    divided = None if only_whole else _fit_divided(changed, num_needed)
    if divided is None:
        return None
    where = describe_candidate(changed, divided)
    if len(divided.gpus) < len(changed.workers):
        change = {**change, "nodes": divided.nodes}
        words = f"{words}, and use {name_nodes(divided.nodes)} alone"
    return Advice(text=f"{words}: it then fits, {where}", change=change)


def _fit_divided(case: Case, num_needed: int) -> Candidate | None:
    """Return the fastest plan that fits whose GPUs hold parts of the model.

    It is over all GPUs, or over the most of the fastest nodes that can where fewer are enough.
    """
    names = [
        name
        for name in CUT_MODES
        if case.spec.parallel in ("auto", name)
        and PARALLEL[name].runnable
        and not (name == "pipeline" and case.spec.refuse_pipeline())
    ]
    groups = [case.workers]
    if num_needed < len(case.workers):
        groups += [case.of(some) for some in list(fastest_together(case))[-2::-1]]
    for workers in groups:
        found = [plan for name in names if (plan := _PLANS[name](case, workers)) is not None]
        fitting = [plan for plan in found if plan.fits]
        if fitting:
            return min(fitting, key=lambda one: one.step_s)
    return None


def _offer_whole(changed: Case, words: str, change: Change, num_needed: int) -> Advice | None:
    """Return advice for a run whose GPUs each hold the whole model; None: too few of them can."""
    # The smallest setting is quick to forecast, and a search takes milliseconds.
    able = [worker for worker in changed.workers if changed.may_fit(worker)]
    if len(able) < num_needed:
        return None
    able = [worker for worker in able if changed.fit(worker, 1).fits]
    if len(able) < num_needed:
        return None
    where = name_nodes(tuple(dict.fromkeys(worker.node.name for worker in able)))
    fullest = min(able, key=lambda worker: _count_free(changed, worker))
    fit = changed.fit(fullest, 1)
    needed, room = fit.memory.expected_bytes / GIB, fit.room_bytes / GIB
    return Advice(
        text=f"{words}: it then fits on {where}, with {needed:.1f} of {room:.1f} GiB", change=change
    )


def _count_free(case: Case, worker: Worker) -> float:
    """Return the bytes of a card that its fit leaves free."""
    fit = case.fit(worker, 1)
    return fit.room_bytes - fit.memory.expected_bytes


def _fits_on(case: Case, name: str) -> bool:
    return all(case.fit(worker, 1).fits for worker in case.of((name,)))


def _nothing_fits(request: PlanRequest, case: Case, found: Sequence[Candidate]) -> Iterator[Advice]:
    """Say what a card would need for the smallest run, and what later versions could do."""
    later = next((one for one in found if one.fits), None)
    if later is not None:
        description = describe_candidate(case, later)
        yield Advice(text=f"It would fit as {description}, which this version cannot train yet")
    change: Change = {}
    for changes in _list_kinds(request):
        for one, _ in changes[-1:]:
            change |= one
    smallest = open_case(replace(request, spec=apply_change(request.spec, change)))
    best = max(smallest.workers, key=lambda worker: _count_free(smallest, worker))
    memories = [smallest.fit(best, 1).memory]
    if request.spec.parallel in ("auto", "streamed"):
        streamed = plan_streamed(smallest, (best,))
        memories += [streamed.gpus[0].memory] if streamed is not None else []
    needed = min(one.expected_bytes - one.desktop_bytes for one in memories) / GIB
    yield Advice(
        text="No change of the run file makes it fit: with all of them together it needs a card "
        f"with {needed:.1f} GiB free, or a smaller model"
    )


def _list_kinds(request: PlanRequest) -> list[list[tuple[Change, str]]]:
    """Return changes with the words for them by kind, the cheapest kind and change first."""
    spec = request.spec
    kinds: list[list[tuple[Change, str]]] = [[], [], [], [], [], []]
    if spec.recompute == "none":
        kinds[0].append(({"recompute": "auto"}, "Let layers recompute activations"))
    if spec.memory_gib is not None:
        kinds[1].append(({"memory_gib": None}, "Remove the memory limit"))
    states = ("adamw", "adamw_8bit", "paged_adamw_8bit")
    for name in states[states.index(spec.optimizer) + 1 :] if spec.parallel != "pipeline" else ():
        kinds[2].append(({"optimizer": name}, _OPTIMIZER_WORDS[name]))
    if spec.adapter.kind != "full":
        for rank in (spec.adapter.rank // 2, spec.adapter.rank // 4, _MIN_RANK):
            if _MIN_RANK <= rank < spec.adapter.rank:
                kinds[3].append(({"adapter.rank": rank}, f"Lower the adapter's rank to {rank}"))
    words = {"lora": "Train a LoRA adapter", "qlora": "Hold the weights in 4 bits (QLoRA)"}
    smaller = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[spec.adapter.kind]
    kinds[4] += [({"adapter.kind": kind}, words[kind]) for kind in smaller]
    longest = min(spec.sequence_tokens, request.data.longest_tokens or spec.sequence_tokens)
    for tokens in (longest // 2, longest // 4, longest // 8):
        if tokens >= _MIN_TOKENS:
            change = {"sequence_tokens": tokens}
            kinds[5].append((change, f"Shorten sequences to {tokens:,} tokens"))
    return kinds


def apply_change(spec: RunSpec, change: Mapping[str, Any]) -> RunSpec:
    """Return the spec with dotted keys changed.

    >>> from agents.contract.spec import DataSpec
    >>> spec = RunSpec(model="m", data=DataSpec(train="d"))
    >>> apply_change(spec, {"adapter.kind": "qlora", "sequence_tokens": 512}).adapter.kind
    'qlora'
    """
    # Together: a setting may be valid only beside another one that changes as well.
    top: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        part, _, name = key.rpartition(".")
        (inner.setdefault(part, {}) if part else top)[name] = value
    parts = {part: replace(getattr(spec, part), **values) for part, values in inner.items()}
    return replace(spec, **top, **parts)


# ---------------------------------------------------------------- a faster way


def _fewer_nodes(case: Case, chosen: Candidate, found: Sequence[Candidate]) -> Iterator[Advice]:
    """Advise fewer nodes where they are faster than all that the spec names."""
    best = find_least(one for one in found if one.fits and one.runnable) or chosen
    together = _together(case, found)
    slower = chosen if best is not chosen and best.nodes != chosen.nodes else together
    if slower is None or not slower.fits or not set(best.nodes) < set(slower.nodes):
        return
    gain = slower.step_s / best.step_s
    if gain < _MIN_GAIN:
        return
    who = name_nodes(best.nodes)
    alone = f"{who} alone" if len(best.nodes) == 1 else who
    it = "it is" if len(best.nodes) == 1 else "they are"
    yield Advice(
        text=f"Use {alone}: {it} {gain:.1f} times faster than {name_nodes(slower.nodes)} together",
        change={"nodes": best.nodes},
    )


def _fill_batch(case: Case, chosen: Candidate, together: Candidate | None) -> Iterator[Advice]:
    """Advise a batch that divides better: a share consists of whole sequences.

    Seven equal GPUs need as long for 24 sequences as for 28.
    """
    if together is None or not together.fits or case.spec.shares is not None:
        return
    speeds, rows = [gpu.tokens_per_s for gpu in together.gpus], case.spec.batch_sequences
    limit = int(MOST["batch_sequences"])
    lost = {
        more: _lost(more, speeds)
        for more in range(rows, min(2 * rows, rows + _MAX_EXTRA_ROWS, limit) + 1)
    }
    # Rounded, so that a slightly better but much larger batch does not win.
    best = min(lost, key=lambda more: (round(lost[more], 2), more))
    gain = lost[rows] / lost[best]
    is_fastest = together.tokens_per_s * gain > _MIN_GAIN * chosen.tokens_per_s
    if gain >= 1 + _MIN_BATCH_GAIN and is_fastest:
        yield Advice(
            text=f"A batch of {best} sequences divides better among {len(speeds)} GPUs than one "
            f"of {rows}: {gain - 1:.0%} more tokens per second, but fewer and larger steps",
            change={"batch_sequences": best},
        )


def _lost(rows: int, speeds: list[float]) -> float:
    """Return the time of a step relative to shares that follow the speeds exactly.

    >>> round(_lost(24, [1.0] * 7), 3), _lost(28, [1.0] * 7)
    (1.167, 1.0)
    """
    ideal = rows / sum(speeds)
    return max(count / v for count, v in zip(split_rows(rows, speeds), speeds, strict=True)) / ideal


def _compress(request: PlanRequest, chosen: Candidate) -> Iterator[Advice]:
    """Advise compressed gradients where a step waits for the network."""
    waited = chosen.parts_s.network_s
    if request.spec.compression != "none" or waited < _SLOW_NETWORK * chosen.step_s:
        return
    if chosen.mode == "pipeline":
        return  # what it waits for is features, not gradients
    yield Advice(
        text=f"{waited / chosen.step_s:.0%} of each step waits for the network: send gradients as "
        "bf16, which halves the wait and changes the last digits of results",
        change={"compression": "bf16"},
    )


def _hold_in_4_bits(request: PlanRequest, chosen: Candidate) -> Iterator[Advice]:
    """Advise QLoRA where copies of 16-bit weights take most of the time."""
    if chosen.mode != "streamed" or request.spec.adapter.kind != "lora":
        return
    change: Change = {"adapter.kind": "qlora"}
    changed = open_case(replace(request, spec=apply_change(request.spec, change)))
    able = [one for one in propose_candidates(changed) if one.fits and one.runnable]
    best = min((one.step_s for one in able if one.nodes == chosen.nodes), default=chosen.step_s)
    if chosen.step_s > _MIN_4_BIT_GAIN * best:
        share = best / chosen.step_s
        text = f"Hold the weights in 4 bits (QLoRA): a step then takes {share:.0%} of the time"
        yield Advice(text=text, change=change)

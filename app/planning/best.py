"""Find the models that fit PCs, with time and cost for given data, and settings for a deadline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import AdapterKind
from app.planning.candidate import Candidate, PlanRequest
from app.planning.quick import plan_quickly
from app.planning.shape.model_shape import ModelShape

_METHODS: tuple[AdapterKind, ...] = ("lora", "qlora")
# Share of the data below which a shortened run is no longer worth an offer.
_LEAST_DATA = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class BestLimits:
    """Deadline and budget of a run."""

    seconds: float | None = None
    """Time until the deadline; None: no deadline."""
    budget: float | None = None
    """Maximum cost of energy; None: no limit."""
    price_per_kwh: float | None = None
    """Price of a kilowatt-hour; None: that of the settings or of the cluster file."""

    def find_share(self, candidate: Candidate) -> float | None:
        """Return the share of a run that keeps the limits, up to 1; None: not known."""
        shares = [1.0]
        for limit, needed in ((self.seconds, candidate.total_s), (self.budget, candidate.cost)):
            if limit is not None:
                if needed is None:
                    return None
                shares.append(limit / needed if needed else 1.0)
        return min(shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingModel:
    """A model that fits the PCs."""

    model: str
    num_parameters: int
    adapter: AdapterKind
    candidate: Candidate
    total_s: float | None
    """Duration with `change`, in seconds; None: the number of rows is not known."""
    energy_wh: float | None
    """Energy of the PCs that take part, in watt-hours; None: not known."""
    cost: float | None
    """Cost of that energy; None: it or the price is not known."""
    share: float | None
    """Share of the steps that keep the limits; None: not known."""
    change: Mapping[str, object] = field(default_factory=dict)
    """Settings of the run, by dotted key."""

    @property
    def is_whole(self) -> bool:
        """True if it keeps the limits with all data."""
        return self.share == 1.0


def find_fitting(
    request: PlanRequest, models: Iterable[tuple[str, ModelShape]], limits: BestLimits
) -> tuple[FittingModel, ...]:
    """Return the models that fit and keep the limits, the largest first that train on all data.

    Args:
        request: the PCs, the data, and the settings except for model and adapter.
        models: name and shape of each model.
        limits: deadline and budget.
    """
    if limits.price_per_kwh is not None:
        cluster = replace(request.cluster, price_per_kwh=limits.price_per_kwh)
        request = replace(request, cluster=cluster)
    found = []
    room_bytes = sum(
        gpu.memory.total_bytes
        for node in request.cluster.nodes
        for gpu in node.gpus
        if gpu.memory is not None
    )
    for name, shape in models:
        asked = replace(request, shape=shape, spec=replace(request.spec, model=name))
        best = _find_best(asked, limits, room_bytes)
        if best is not None:
            found.append(best)
    found.sort(key=lambda one: (one.share is None, not one.is_whole, -one.num_parameters))
    return tuple(found)


def _find_best(request: PlanRequest, limits: BestLimits, room_bytes: int) -> FittingModel | None:
    """Return the first way of training a model that keeps the limits, else the quickest, or None.

    LoRA comes before QLoRA, as it rounds no weights; with streamed weights, the faster one. Packed
    sequences are tried if neither keeps the limits.
    """
    packings = dict.fromkeys((request.spec.packing, OBJECTIVES[request.spec.objective].packs))
    # Streamed from RAM or SSD, 16-bit weights are slower than those in 4 bits.
    methods = _METHODS if 2 * request.shape.num_parameters < room_bytes else _METHODS[1:]
    best: FittingModel | None = None
    for packing in packings:
        streamed = []
        for kind in methods:
            adapter = replace(request.spec.adapter, kind=kind)
            spec = replace(request.spec, adapter=adapter, packing=packing)
            chosen = plan_quickly(replace(request, spec=spec))
            if chosen is None:
                continue
            one = _judge(request, kind, chosen, limits, packing=packing)
            if any(gpu.num_streamed for gpu in chosen.gpus):
                streamed.append(one)
            elif one.share is None or one.is_whole:
                return one
            else:
                best = _quicker(best, one)
        if streamed and best is None:
            one = max(streamed, key=lambda one: one.candidate.tokens_per_s)
            if one.share is None or one.is_whole:
                return one
            best = one
    return best if best is not None and (best.share or 0.0) >= _LEAST_DATA else None


def _quicker(first: FittingModel | None, other: FittingModel) -> FittingModel:
    return max(filter(None, (first, other)), key=lambda one: one.share or 0.0)


def _judge(
    request: PlanRequest, kind: AdapterKind, chosen: Candidate, limits: BestLimits, *, packing: bool
) -> FittingModel:
    """Return a plan with the settings that keep the limits, by fewer steps if need be."""
    change: dict[str, object] = {"adapter.kind": kind}
    if packing != request.spec.packing:
        change["packing"] = packing
    share, part = limits.find_share(chosen), 1.0
    if share is not None and share < 1 and chosen.num_steps:
        num_steps = math.floor(share * chosen.num_steps)
        share = part = num_steps / chosen.num_steps
        change["max_steps"] = num_steps
    energy_wh, cost = chosen.pc_energy_wh, chosen.cost
    return FittingModel(
        model=request.spec.model,
        num_parameters=request.shape.num_parameters,
        adapter=kind,
        candidate=chosen,
        total_s=None if chosen.total_s is None else part * chosen.total_s,
        energy_wh=None if energy_wh is None else part * energy_wh,
        cost=None if cost is None else part * cost,
        share=share,
        change=change,
    )

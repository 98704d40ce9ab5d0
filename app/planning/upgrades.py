"""Rank single purchases by the speed that they add to a run for their price."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from agents.contract.spec import split_place
from agents.shared.cards import GIB
from app.planning.candidate import Candidate, PlanRequest
from app.planning.hardware.cluster import (
    Cluster,
    LinkSpeed,
    PlannedGpu,
    PlannedNode,
    ethernet,
    guess_desktop,
)
from app.planning.hardware.rates import find_rates
from app.planning.quick import Places, Shared, plan_quickly

OfferKind = Literal["gpu", "ram", "nic", "switch", "pc"]
# Maximum number of changes that are planned, and from which number of GPUs on they are fewer: a
# plan takes a few milliseconds on two GPUs and a tenth of a second on ten.
_MAX_PLANS, _FEW_PLANS, _MANY_GPUS = 24, 12, 5
# Maximum number of PCs for which more RAM is planned.
_MAX_RAM_PCS = 2
# Gain below which a purchase is useless, as a share: the error of two forecasts.
_LEAST_GAIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedPart:
    """Row of a price list."""

    kind: OfferKind
    name: str
    """Card; GiB of RAM; Gb/s of a network card or switch; GiB of RAM of a PC without a GPU."""
    price: float
    slots: int = 2
    """Slots that a card covers."""

    @property
    def size(self) -> float:
        """GiB or Gb/s."""
        return float(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceList:
    """Things to buy."""

    offers: tuple[PricedPart, ...]
    currency: str = ""
    note: str = ""
    """Source of the prices, as a sentence without a full stop."""

    def list_kind(self, kind: OfferKind) -> list[PricedPart]:
        """Return the rows of a kind."""
        return [one for one in self.offers if one.kind == kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgrade:
    """One purchase with the plan after it."""

    kind: OfferKind
    name: str
    """Name of the offer."""
    text: str
    """Purchase and its place, such as `RTX 3090 instead of RTX 3060 in tower`."""
    price: float
    caveats: tuple[str, ...]
    """Needs that the plan cannot check, such as free slots, without full stops."""
    tokens_per_s: float | None
    """Speed after the purchase; None: the run still does not fit."""
    gain_tokens_per_s: float
    gain_per_100: float | None
    """Tokens per second added per 100 of the currency; None: it costs nothing."""
    candidate: Candidate | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgrades:
    """Purchases for a run, the most speed for the price first."""

    base: Candidate | None
    """Fastest plan without a purchase; None: the run does not fit."""
    found: tuple[Upgrade, ...]
    currency: str
    notes: tuple[str, ...]
    """Sentences on what is guessed, without full stops."""

    @property
    def useful(self) -> tuple[Upgrade, ...]:
        """Purchases that make the run faster by more than forecasts differ."""
        least = _LEAST_GAIN * self.base.tokens_per_s if self.base is not None else 0.0
        return tuple(one for one in self.found if one.gain_tokens_per_s > least)

    @property
    def best_places(self) -> tuple[Upgrade, ...]:
        """Useful purchases, each thing once: in the PC, or with the card, where it gains most."""
        places = {(one.kind, one.name): one for one in reversed(self.useful)}
        return tuple(one for one in self.useful if places[one.kind, one.name] is one)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """One purchase, and the PCs after it."""

    offer: PricedPart
    text: str
    price: float
    cluster: Cluster
    caveats: tuple[str, ...]
    added: Places = frozenset()
    """New GPUs."""
    promise: float = math.inf
    """Rough gain for the price, by which some of many changes are chosen; infinite: planned first.
    """


def rank_upgrades(request: PlanRequest, prices: PriceList, base: Candidate | None) -> Upgrades:
    """Return single purchases for a run, ranked.

    Args:
        request: the run and its PCs.
        prices: things to buy.
        base: the run's plan; None: it does not fit.
    """
    spec, cluster = request.spec, request.cluster
    if spec.nodes != "all":
        cluster = cluster.keep(dict.fromkeys(split_place(entry)[0] for entry in spec.nodes))
    # After a purchase the plan chooses among all GPUs, since no list names the new one.
    free = replace(request, spec=replace(spec, nodes="all", shares=None), cluster=cluster)
    shared = Shared()
    # As quickly as all others: gains must not come from another search.
    chosen = plan_quickly(free, [_places(base)], shared)
    base = max(filter(None, (base, chosen)), key=lambda one: one.tokens_per_s, default=None)
    changes = list(_list_changes(cluster, prices))
    # A second GPU in a PC that trains anyway needs no network.
    training = {node for node, _ in _places(base)}
    changes.sort(key=lambda one: (-one.promise, training.isdisjoint(dict(one.added))))
    planned = _choose_promising(changes, sum(len(node.gpus) for node in cluster.nodes))
    found = [_plan_change(free, change, base, shared) for change in planned]
    found.sort(key=_order)
    notes = [
        prices.note,
        "cards to buy are planned by their data sheets; slots and power supplies are not known",
    ]
    if len(planned) < len(changes):
        notes.append(f"{len(changes) - len(planned)} less promising changes were not planned")
    return Upgrades(
        base=base,
        found=tuple(found),
        currency=prices.currency,
        notes=tuple(note for note in notes if note),
    )


def _order(one: Upgrade) -> tuple[object, ...]:
    per_100 = one.gain_per_100 if one.gain_per_100 is not None else one.gain_tokens_per_s * 1e9
    return -per_100, -one.gain_tokens_per_s, one.price, one.text


def _plan_change(
    free: PlanRequest, change: _Change, base: Candidate | None, shared: Shared
) -> Upgrade:
    places = _places(base)
    likely = [places | change.added, change.added, places] if places else []
    after = plan_quickly(replace(free, cluster=change.cluster), likely, shared)
    before = base.tokens_per_s if base is not None else 0.0
    speed = max(before, after.tokens_per_s) if after is not None else before
    gain = speed - before
    return Upgrade(
        kind=change.offer.kind,
        name=change.offer.name,
        text=change.text,
        price=change.price,
        caveats=change.caveats,
        tokens_per_s=speed or None,
        gain_tokens_per_s=gain,
        gain_per_100=100 * gain / change.price if change.price else None,
        candidate=after,
    )


def _places(candidate: Candidate | None) -> Places:
    gpus = candidate.gpus if candidate is not None else ()
    return frozenset((gpu.node, gpu.device) for gpu in gpus)


def _choose_promising(changes: Sequence[_Change], num_gpus: int) -> list[_Change]:
    """Return the changes to plan, the first of each offer before the second of any."""
    num_seen: dict[PricedPart, int] = {}
    ranked: list[tuple[bool, int, int, _Change]] = []
    for change in changes:
        nth = num_seen[change.offer] = num_seen.get(change.offer, 0) + 1
        # RAM and networks are few and hard to estimate.
        ranked.append((math.isfinite(change.promise), nth, len(ranked), change))
    most = _MAX_PLANS if num_gpus < _MANY_GPUS else _FEW_PLANS
    return [change for *_, change in sorted(ranked, key=lambda one: one[:3])[:most]]


# ---------------------------------------------------------------- things to buy


def _list_changes(cluster: Cluster, prices: PriceList) -> Iterator[_Change]:
    """Yield every single change; of equal PCs only the first is changed."""
    nodes = list({_alike(cluster, node): node for node in reversed(cluster.nodes)}.values())[::-1]
    cards = prices.list_kind("gpu")
    for node in nodes:
        # No desktop card fits into a laptop.
        if not any(gpu.card is not None and gpu.card.is_laptop for gpu in node.gpus):
            for offer in cards:
                yield from _change_gpus(cluster, node, offer)
    by_ram = sorted(nodes, key=lambda node: node.ram_bytes or 0)
    for offer in prices.list_kind("ram"):
        for node in by_ram[:_MAX_RAM_PCS]:
            if node.ram_bytes is not None:
                more = node.ram_bytes + int(offer.size * GIB)
                yield _Change(
                    offer=offer,
                    text=f"{offer.name} GiB more RAM in {node.name}",
                    price=offer.price,
                    cluster=_put(cluster, node, replace(node, ram_bytes=more)),
                    caveats=("needs free memory slots",),
                )
    yield from _change_network(cluster, prices)
    for offer in prices.list_kind("pc"):
        yield from (_add_pc(cluster, offer, card) for card in cards)


def _alike(cluster: Cluster, node: PlannedNode) -> tuple[object, ...]:
    gpus = tuple((gpu.name, gpu.memory_bytes, gpu.power_limit_w) for gpu in node.gpus)
    links = sorted(
        cluster.link(node.name, other.name).bytes_per_s
        for other in cluster.nodes
        if other.name != node.name
    )
    return gpus, node.ram_bytes, node.system, *links


def _put(cluster: Cluster, old: PlannedNode, new: PlannedNode) -> Cluster:
    return replace(cluster, nodes=tuple(new if one is old else one for one in cluster.nodes))


def _change_gpus(cluster: Cluster, node: PlannedNode, offer: PricedPart) -> Iterator[_Change]:
    """Yield a card in a free slot of a PC, and instead of its slowest one."""
    gpus = tuple(gpu for gpu in node.gpus if gpu.device != "cpu")
    new = PlannedGpu(name=offer.name)
    number = max((int(gpu.device.partition(":")[2]) for gpu in gpus), default=-1) + 1
    desktop_bytes = 0 if gpus else guess_desktop(node.system)
    added = replace(new, device=f"cuda:{number}", desktop_bytes=desktop_bytes)
    yield _Change(
        offer=offer,
        text=f"{offer.name} in a free slot of {node.name}",
        price=offer.price,
        cluster=_put(cluster, node, replace(node, gpus=(*gpus, added))),
        caveats=(f"needs {offer.slots} slots and {new.power_w or 0:.0f} W more",),
        added=frozenset({(node.name, added.device)}),
        promise=_worth(new) / max(offer.price, 1.0),
    )
    if not gpus:
        return
    old = min(gpus, key=_worth)
    gain = _worth(new) - _worth(old)
    if gain <= 0 and _memory(new) <= _memory(old):
        return
    placed = replace(new, device=old.device, desktop_bytes=old.desktop_bytes)
    more_w = (new.power_w or 0) - (old.power_w or 0)
    power = f"{abs(more_w):.0f} W {'more' if more_w > 0 else 'less'}"
    yield _Change(
        offer=offer,
        text=f"{offer.name} instead of {old.name} in {node.name}",
        price=offer.price,
        cluster=_put(
            cluster, node, replace(node, gpus=tuple(placed if one is old else one for one in gpus))
        ),
        caveats=(f"needs {offer.slots} slots and {power}",),
        added=frozenset({(node.name, placed.device)}),
        promise=gain / max(offer.price, 1.0),
    )


def _worth(gpu: PlannedGpu) -> float:
    return find_rates(gpu).matrix_flops_per_s


def _memory(gpu: PlannedGpu) -> int:
    return gpu.memory.total_bytes if gpu.memory is not None else 0


def _change_network(cluster: Cluster, prices: PriceList) -> Iterator[_Change]:
    """Yield faster network cards in all PCs with slower links, with the switch of that speed."""
    names = [node.name for node in cluster.nodes]
    switches = {offer.size: offer for offer in prices.list_kind("switch")}
    for offer in prices.list_kind("nic"):
        new = ethernet(offer.size)
        slow = [pair for pair in combinations(names, 2) if _is_slower(cluster.link(*pair), new)]
        pcs = [name for name in names if any(name in pair for pair in slow)]
        if not slow or (len(names) > 2 and offer.size not in switches):
            continue
        # Two PCs need a cable only.
        switch = switches[offer.size] if len(names) > 2 else None
        yield _Change(
            offer=offer,
            text=f"{offer.name} Gb/s: {len(pcs)} network cards and "
            + ("a switch" if switch else "a cable"),
            price=len(pcs) * offer.price + (switch.price if switch else 0.0),
            cluster=replace(
                cluster,
                links={
                    **cluster.links,
                    **{
                        frozenset(pair): replace(new, latency_s=cluster.link(*pair).latency_s)
                        for pair in slow
                    },
                },
            ),
            caveats=("needs a free slot or USB port in each PC, and cables for this speed",),
        )


def _is_slower(link: LinkSpeed, new: LinkSpeed) -> bool:
    # A measured link may be a little below its nominal speed.
    return link.bytes_per_s < 0.7 * new.bytes_per_s


def _add_pc(cluster: Cluster, offer: PricedPart, card: PricedPart) -> _Change:
    """Return another PC with a card, on a link like the typical one."""
    taken = {node.name for node in cluster.nodes}
    name = next(name for i in range(len(taken) + 1) if (name := f"new-pc{i or ''}") not in taken)
    gpu = PlannedGpu(name=card.name, desktop_bytes=guess_desktop("linux"))
    node = PlannedNode(name=name, gpus=(gpu,), ram_bytes=int(offer.size * GIB), system="linux")
    pairs = list(combinations(sorted(taken), 2))
    links = sorted((cluster.link(*pair) for pair in pairs), key=lambda one: one.bytes_per_s)
    link = links[len(links) // 2] if links else cluster.default_link
    price = offer.price + card.price
    return _Change(
        offer=offer,
        text=f"another PC with {card.name} and {offer.name} GiB of RAM",
        price=price,
        cluster=replace(
            cluster,
            nodes=(*cluster.nodes, node),
            links={**cluster.links, **{frozenset((name, other)): link for other in taken}},
        ),
        caveats=(f"its network is planned with {link.bytes_per_s * 8e-9:.2g} Gb/s",),
        added=frozenset({(name, gpu.device)}),
        promise=_worth(gpu) / max(price, 1.0),
    )

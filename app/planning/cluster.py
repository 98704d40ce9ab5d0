"""What the planner knows of PCs and of the ways between them: found, or described in a file.

A rate is that of payload, as a transfer would measure it. Where nothing was measured, the nominal
speed of the interface counts, less what Ethernet and TCP take; where not even that is known,
Gigabit Ethernet is assumed, and marked as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from agents.contract.cards import Card, find_card
from agents.contract.node import Calibration, GpuFacts, GpuSample, NodeFacts, Sample
from app.planning.memory.forecast import GpuMemory

System = Literal["linux", "windows", "wsl"]
LinkSource = Literal["measured", "nominal", "given", "assumed"]
ETHERNET_SHARE = 0.94
"""Payload of TCP in full Ethernet frames: 1,448 of 1,538 bytes."""
_FAST_SHARE = 0.90
"""Of 25 Gb/s and more, where one core cannot copy faster."""
_FAST_GBIT = 20.0
_ASSUMED_LATENCY_S = 0.0002
_WDDM_BYTES = 700 << 20
"""What Windows keeps of a card that also drives a screen, where it was not measured."""
_DESKTOP_BYTES = 350 << 20
"""The same for a Linux desktop."""
_SYSTEM_BYTES = 4 << 30
"""Of a PC's memory that its own programs need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGpu:
    """One GPU, or the processor of a PC without any."""

    name: str
    """As the driver gives it, or as a person wrote it."""
    device: str = "cuda:0"
    """As the node counts them; `cpu`: the processor."""
    memory_bytes: int | None = None
    desktop_bytes: int = 0
    """Taken by others: measured, else a guess by the system."""
    power_limit_w: float | None = None
    capability: tuple[int, int] | None = None
    calibration: Calibration | None = None
    """What a measurement on the node found; None: none was made."""

    @property
    def card(self) -> Card | None:
        """Its data sheet; None: not listed."""
        return find_card(self.name)

    @property
    def memory(self) -> GpuMemory | None:
        """What the forecast of memory knows; None: the size is not known."""
        card = self.card
        total = self.memory_bytes or (card.memory_bytes if card else None)
        if total is None:
            return None
        capability = self.capability or (card.capability if card else (8, 6))
        return GpuMemory(
            total_bytes=total,
            desktop_bytes=self.desktop_bytes,
            capability=capability,
            num_multiprocessors=card.num_multiprocessors if card else 60,
        )

    @property
    def power_w(self) -> float | None:
        """Its limit, or its board's; None: neither is known."""
        card = self.card
        return self.power_limit_w or (card.power_w if card else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedNode:
    """One PC."""

    name: str
    gpus: tuple[PlannedGpu, ...] = ()
    ram_bytes: int | None = None
    system: System | None = None

    @property
    def free_ram_bytes(self) -> int:
        """What training may pin of the PC's memory; Windows lets WSL pin less than half of it.

        >>> PlannedNode(name="alpha", ram_bytes=32 * 2**30, system="wsl").free_ram_bytes / 2**30
        12.0
        >>> PlannedNode(name="beta", ram_bytes=32 * 2**30).free_ram_bytes / 2**30
        24.0
        """
        total = self.ram_bytes or 0
        if self.system in ("windows", "wsl"):
            return total * 3 // 8
        return max(0, total * 7 // 8 - _SYSTEM_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """The way between two PCs, the same in both directions at once."""

    bytes_per_s: float
    """Payload."""
    latency_s: float = _ASSUMED_LATENCY_S
    """Of a round trip."""
    source: LinkSource = "assumed"


def ethernet(
    gbit_per_s: float, latency_s: float | None = None, source: LinkSource = "given"
) -> LinkSpeed:
    """Return the link that a nominal speed gives.

    >>> ethernet(1.0).bytes_per_s
    117500000.0
    """
    share = _FAST_SHARE if gbit_per_s >= _FAST_GBIT else ETHERNET_SHARE
    return LinkSpeed(
        bytes_per_s=gbit_per_s * 1e9 / 8 * share,
        latency_s=_ASSUMED_LATENCY_S if latency_s is None else latency_s,
        source=source,
    )


ASSUMED = ethernet(1.0, source="assumed")
Pair = frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """PCs that a run may use, in their order, and the ways between them."""

    nodes: tuple[PlannedNode, ...]
    links: Mapping[Pair, LinkSpeed] = field(default_factory=dict)
    """By the two names; what is missing is like `default_link`."""
    default_link: LinkSpeed = ASSUMED

    def link(self, first: str, second: str) -> LinkSpeed:
        """Return the way between two PCs."""
        return self.links.get(frozenset((first, second)), self.default_link)

    def keep(self, names: Iterable[str]) -> Cluster:
        """Return the part of it with these PCs only."""
        wanted = set(names)
        return Cluster(
            nodes=tuple(node for node in self.nodes if node.name in wanted),
            links=self.links,
            default_link=self.default_link,
        )


def make_cluster(
    facts: Mapping[str, NodeFacts],
    *,
    samples: Mapping[str, Sample] | None = None,
    measured: Mapping[Pair, LinkSpeed] | None = None,
    interfaces: Mapping[str, str | None] | None = None,
    calibrations: Mapping[tuple[str, str], Calibration] | None = None,
) -> Cluster:
    """Return what is known of real nodes.

    Args:
        facts: by node, in order.
        samples: the newest of each node; they tell what others hold of a card.
        measured: ways that a check measured.
        interfaces: the network device that each node trains over.
        calibrations: by node and name of the card.
    """
    known = calibrations or {}
    nodes = tuple(
        _node(name, fact, (samples or {}).get(name), known) for name, fact in facts.items()
    )
    links = dict(measured or {})
    speeds = {
        name: _nominal_gbit(fact, (interfaces or {}).get(name)) for name, fact in facts.items()
    }
    for one, other in combinations(facts, 2):
        mine, theirs = speeds[one], speeds[other]
        if frozenset((one, other)) not in links and mine and theirs:
            links[frozenset((one, other))] = ethernet(min(mine, theirs), source="nominal")
    return Cluster(nodes=nodes, links=links)


def _node(
    name: str,
    facts: NodeFacts,
    sample: Sample | None,
    calibrations: Mapping[tuple[str, str], Calibration],
) -> PlannedNode:
    system: System = "wsl" if facts.wsl else "linux"
    used = {one.uuid: one for one in (sample.gpus if sample else ())}
    gpus = tuple(
        _gpu(gpu, used.get(gpu.uuid), system, calibrations.get((name, gpu.name)))
        for gpu in facts.gpus
    )
    if not gpus:
        measured = calibrations.get((name, "CPU"))
        gpus = (
            PlannedGpu(
                name="CPU", device="cpu", memory_bytes=facts.memory_bytes, calibration=measured
            ),
        )
    return PlannedNode(name=name, gpus=gpus, ram_bytes=facts.memory_bytes, system=system)


def _gpu(
    gpu: GpuFacts, sample: GpuSample | None, system: System, calibration: Calibration | None
) -> PlannedGpu:
    used = sample.memory_used_bytes if sample and not sample.process_ids else None
    return PlannedGpu(
        name=gpu.name,
        device=f"cuda:{gpu.index}",
        memory_bytes=gpu.memory_bytes,
        desktop_bytes=guess_desktop(system) if used is None else used,
        power_limit_w=gpu.power_limit_w,
        capability=_capability(gpu.capability),
        calibration=calibration,
    )


def guess_desktop(system: System | None) -> int:
    """Return what the screen takes of a card where nobody measured it."""
    return _WDDM_BYTES if system in ("windows", "wsl") else _DESKTOP_BYTES


def _capability(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _nominal_gbit(facts: NodeFacts, interface: str | None) -> float | None:
    """Return the speed of the interface that training uses, else of the one with the address."""
    for one in facts.interfaces:
        wanted = one.name == interface if interface else one.address == facts.address
        if wanted and one.speed_mbit:
            return one.speed_mbit / 1000
    return None

"""Nodes, GPUs and links as the planner sees them: discovered, or described in a cluster file.

Rates are payload rates, as a transfer would measure them. A link that was not measured gets the
nominal speed of its interface minus the overhead of Ethernet and TCP. If that is not known either,
Gigabit Ethernet is assumed and marked as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

from agents.contract.layer_plan import STREAMED_SHARE
from agents.contract.node import Calibration, GpuFacts, GpuSample, InterfaceFacts, NodeFacts, Sample
from agents.contract.spec import split_place
from agents.shared.cards import Card, find_card, find_similar
from app.planning.hardware.mig import describe_mig
from app.planning.memory.gpu import GpuMemory, guess_context, guess_reserved

System = Literal["linux", "windows", "wsl"]
LinkSource = Literal["measured", "nominal", "given", "assumed"]
ETHERNET_SHARE = 0.94
"""Share of TCP payload in full Ethernet frames: 1,448 of 1,538 bytes."""
# Share of the nominal speed from `_FAST_GBIT` on, since one core cannot copy faster.
_FAST_SHARE = 0.90
_FAST_GBIT = 20.0
# Round trip through one switch, in seconds, if not measured.
_ASSUMED_LATENCY_S = 0.0002
# GPU memory that Windows keeps on a card that drives a screen, in bytes, if not measured.
_WDDM_BYTES = 700 << 20
# GPU memory that a Linux desktop keeps, in bytes, if not measured.
_DESKTOP_BYTES = 350 << 20
ASSUMED_DISK_BYTES_PER_S = 2e9
"""Sequential reads from an SSD that was not measured, in bytes per second: NVMe on PCI Express 3.0
with 4 lanes reaches 3.5 GB/s by its data sheet, and less once it is warm."""
ASSUMED_PC_W = 80.0
"""Power of a PC without its GPUs while they train, in watts: one core of a CPU is busy, and the
power supply loses a tenth of all."""
# Host memory reserved for the PC's own programs, in bytes.
_SYSTEM_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGpu:
    """One GPU, or the CPU of a node without any."""

    name: str
    """Name as the driver reports it, or as a cluster file gives it."""
    device: str = "cuda:0"
    """Device on the node, such as `cuda:1`; `cpu`: the CPU."""
    memory_bytes: int | None = None
    """All memory of the card, in bytes."""
    reserved_bytes: int | None = None
    """Part of it that the driver keeps for itself, in bytes; None: the typical amount."""
    desktop_bytes: int = 0
    """Memory that other programs hold, in bytes: measured, else typical for the system."""
    power_limit_w: float | None = None
    capability: tuple[int, int] | None = None
    flops_per_s: float | None = None
    """Peak of dense matrix products that the user gives; None: that of the data sheet."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of the card's memory that the user gives; None: that of the data sheet."""
    bus_bytes_per_s: float | None = None
    """Copies to and from host memory in its slot; None: a slot as fast as the card."""
    calibration: Calibration | None = None
    """Rates measured on the node, or on another one with the same device; None: not measured."""
    measured_on: str = ""
    """Name of another node on which `calibration` was measured; empty: this node, or not measured.
    """

    @property
    def card(self) -> Card | None:
        """Data sheet of the card; None: not listed."""
        return find_card(self.name, self.memory_bytes)

    @property
    def similar(self) -> Card | None:
        """Data sheet of the card, else the lowest figures of its class; None: no class known."""
        return self.card or find_similar(self.name, self.capability)

    @property
    def memory(self) -> GpuMemory | None:
        """Input of the memory forecast; None: the size of the memory is not known."""
        card = self.similar
        total = self.memory_bytes or (self.card.memory_bytes if self.card else None)
        if total is None:
            return None
        capability = self.capability or (card.capability if card else (8, 6))
        reserved = guess_reserved(total) if self.reserved_bytes is None else self.reserved_bytes
        processors = self.card.num_multiprocessors if self.card else 60
        measured = self.calibration.context_bytes if self.calibration else None
        is_cpu = self.device == "cpu"
        return GpuMemory(
            total_bytes=total if is_cpu else total - reserved,  # no driver reserves RAM
            desktop_bytes=self.desktop_bytes,
            capability=capability,
            num_multiprocessors=processors,
            context_bytes=guess_context(processors, measured),
        )

    @property
    def power_w(self) -> float | None:
        """Power limit, or the board power of the data sheet, in watts; None: neither is known."""
        card = self.card
        return self.power_limit_w or (card.power_w if card else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedNode:
    """One node with its GPUs."""

    name: str
    gpus: tuple[PlannedGpu, ...] = ()
    ram_bytes: int | None = None
    ram_limit: str = ""
    """Where a limit is set that leaves it less RAM than the PC has; empty: no limit."""
    system: System | None = None
    num_cores: int | None = None
    unused_gpus: tuple[str, ...] = ()
    """Sentences about GPUs that cannot train, without a full stop."""
    has_compiler: bool = True
    """True if it has the C compiler that compiled layers need, or if that was not checked."""
    disk_bytes_per_s: float | None = None
    """Sequential reads from the SSD of the agent's home, in bytes per second; None: not measured.
    """
    pc_w: float | None = None
    """Power of the PC without its GPUs while it trains, in watts; None: not known."""

    @property
    def power_w(self) -> float:
        """Power of the PC without its GPUs while it trains: as given, else typical, in watts."""
        return ASSUMED_PC_W if self.pc_w is None else self.pc_w

    @property
    def free_ram_bytes(self) -> int:
        """Host memory that training may pin, in bytes.

        >>> PlannedNode(name="alpha", ram_bytes=32 * 2**30, system="wsl").free_ram_bytes / 2**30
        12.0
        >>> PlannedNode(name="beta", ram_bytes=32 * 2**30).free_ram_bytes / 2**30
        24.0
        """
        total = self.ram_bytes or 0
        if self.system in ("windows", "wsl"):
            return total * 3 // 8  # Windows lets WSL pin less than half
        return max(0, total * 7 // 8 - _SYSTEM_BYTES)

    @property
    def streamed_ram_bytes(self) -> int:
        """Maximum host memory of streamed weights, in bytes.

        This is the trainer's own rule, a share of the memory that is free at the start.

        >>> PlannedNode(name="beta", ram_bytes=64 * 2**30).streamed_ram_bytes / 2**30
        36.0
        """
        started = max(0, (self.ram_bytes or 0) - _SYSTEM_BYTES)
        return min(self.free_ram_bytes, int(STREAMED_SHARE * started))

    @property
    def why_little_ram(self) -> str:
        """Reason why the node has little RAM, as a clause after a comma; empty: not known."""
        if self.ram_limit:
            return f", as {self.ram_limit} limits it to {(self.ram_bytes or 0) / 2**30:.1f} GiB"
        return ", as WSL pins less than half" if self.system == "wsl" else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """Speed of the link between two nodes, equal in both directions at once.

    A medium that cannot send and receive at once, such as Wi-Fi, has half its rate per direction.
    """

    bytes_per_s: float
    """Payload per direction, in bytes per second."""
    latency_s: float = _ASSUMED_LATENCY_S
    """Round trip, in seconds."""
    source: LinkSource = "assumed"


def ethernet(
    gbit_per_s: float,
    latency_s: float | None = None,
    source: LinkSource = "given",
    *,
    half_duplex: bool = False,
) -> LinkSpeed:
    """Return the link of an interface with this nominal speed.

    Args:
        gbit_per_s: nominal speed, in Gb/s.
        latency_s: round trip, in seconds; None: that of one switch.
        source: origin of the speed.
        half_duplex: whether both directions share the medium, as in Wi-Fi.

    >>> ethernet(1.0).bytes_per_s, ethernet(1.0, half_duplex=True).bytes_per_s
    (117500000.0, 58750000.0)
    """
    share = _FAST_SHARE if gbit_per_s >= _FAST_GBIT else ETHERNET_SHARE
    if half_duplex:
        share /= 2
    return LinkSpeed(
        bytes_per_s=gbit_per_s * 1e9 / 8 * share,
        latency_s=_ASSUMED_LATENCY_S if latency_s is None else latency_s,
        source=source,
    )


def nominal_gbit(bytes_per_s: float) -> float:
    """Return the nominal speed of a link with this payload, in Gb/s.

    >>> [round(nominal_gbit(ethernet(g).bytes_per_s), 6) for g in (1.0, 25.0)]
    [1.0, 25.0]
    """
    gbit = bytes_per_s * 8e-9
    return gbit / (_FAST_SHARE if gbit >= _FAST_GBIT * ETHERNET_SHARE else ETHERNET_SHARE)


ASSUMED = ethernet(1.0, source="assumed")
Pair = frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Uplink:
    """A cable that some PCs share on their way to all others, such as between two switches."""

    nodes: frozenset[str]
    """Names of the PCs behind it."""
    bytes_per_s: float
    """Payload per direction, in bytes per second."""

    def divides(self, first: str, second: str) -> bool:
        """Return whether traffic between two PCs crosses it."""
        return (first in self.nodes) != (second in self.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes that a run may use, in order, and the links between them."""

    nodes: tuple[PlannedNode, ...]
    links: Mapping[Pair, LinkSpeed] = field(default_factory=dict)
    """Links by the pair of names; a missing one is like `default_link`."""
    default_link: LinkSpeed = ASSUMED
    uplinks: tuple[Uplink, ...] = ()
    """Cables that several PCs share."""
    price_per_kwh: float | None = None
    """Price of electricity in the user's currency; None: not known."""

    def link(self, first: str, second: str) -> LinkSpeed:
        """Return the link between two nodes, as slow as the uplinks that it crosses."""
        found = self.links.get(frozenset((first, second)), self.default_link)
        crossed = [one.bytes_per_s for one in self.uplinks if one.divides(first, second)]
        if not crossed or found.source == "measured":
            return found
        return replace(found, bytes_per_s=min(found.bytes_per_s, *crossed))

    def keep(self, entries: Iterable[str]) -> Cluster:
        """Return the cluster reduced to these nodes, or GPUs such as `tower:0`, in their order."""
        wanted: dict[str, set[str | None]] = {}
        for name, device in map(split_place, entries):
            wanted.setdefault(name, set()).add(device)
        known = {node.name: node for node in self.nodes}
        nodes = [
            known[name]
            if None in devices
            else replace(
                known[name], gpus=tuple(gpu for gpu in known[name].gpus if gpu.device in devices)
            )
            for name, devices in wanted.items()
            if name in known
        ]
        return replace(self, nodes=tuple(nodes))

    def name_places(self, places: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Return entries of `nodes` for these devices: the PC, or its GPUs if some are left out.

        >>> one = PlannedNode(name="tower", gpus=(PlannedGpu(name="a", device="cuda:0"),
        ...     PlannedGpu(name="b", device="cuda:1")))
        >>> Cluster(nodes=(one,)).name_places([("tower", "cuda:1")])
        ('tower:1',)
        """
        used: dict[str, list[str]] = {}
        for name, device in places:
            used.setdefault(name, []).append(device)
        sizes = {node.name: len(node.gpus) for node in self.nodes}
        found: list[str] = []
        for name, devices in used.items():
            is_whole = len(devices) >= sizes.get(name, 0)
            found += [name] if is_whole else [f"{name}:{one.partition(':')[2]}" for one in devices]
        return tuple(found)


def make_cluster(
    facts: Mapping[str, NodeFacts],
    *,
    samples: Mapping[str, Sample] | None = None,
    measured: Mapping[Pair, LinkSpeed] | None = None,
    interfaces: Mapping[str, str | None] | None = None,
    calibrations: Mapping[tuple[str, str], Calibration] | None = None,
) -> Cluster:
    """Return the cluster of real nodes.

    Args:
        facts: facts by node, in order.
        samples: newest sample by node, which shows the memory that other programs hold.
        measured: links measured by a check.
        interfaces: network device that training uses, by node.
        calibrations: rates by node and name of the card.
    """
    known = calibrations or {}
    nodes = _share_measurements(
        facts,
        tuple(_node(name, fact, (samples or {}).get(name), known) for name, fact in facts.items()),
    )
    links = dict(measured or {})
    speeds = {
        name: _nominal_gbit(fact, (interfaces or {}).get(name)) for name, fact in facts.items()
    }
    wireless = {
        name for name, fact in facts.items() if _is_wireless(fact, (interfaces or {}).get(name))
    }
    for one, other in combinations(facts, 2):
        mine, theirs = speeds[one], speeds[other]
        # A link is as fast as the slower of its two interfaces.
        pair = frozenset((one, other))
        is_wireless = not pair.isdisjoint(wireless)
        if pair in links:
            # A check measures one direction after the other.
            if is_wireless:
                links[pair] = replace(links[pair], bytes_per_s=links[pair].bytes_per_s / 2)
        elif mine and theirs:
            links[pair] = ethernet(min(mine, theirs), source="nominal", half_duplex=is_wireless)
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
    return PlannedNode(
        name=name,
        gpus=gpus,
        ram_bytes=facts.memory_bytes,
        ram_limit=next((one.place for one in facts.limits if one.kind == "memory"), ""),
        system=system,
        num_cores=facts.num_cores,
        unused_gpus=tuple(describe_mig(gpu) for gpu in facts.mig_gpus),
        has_compiler=facts.compiler is not None,
        # Each calibration of the node measures the same SSD; the fastest was disturbed the least.
        disk_bytes_per_s=max(
            (
                found.disk_bytes_per_s
                for (node, _), found in calibrations.items()
                if node == name and found.disk_bytes_per_s
            ),
            default=None,
        ),
    )


def _share_measurements(
    facts: Mapping[str, NodeFacts], nodes: tuple[PlannedNode, ...]
) -> tuple[PlannedNode, ...]:
    """Give each device that was not measured the rates of an equal one that was."""
    # Otherwise shares of a batch would follow the error of a guess about equal hardware.
    known: dict[tuple[object, ...], tuple[str, Calibration]] = {}
    for node in nodes:
        for gpu in node.gpus:
            if gpu.calibration is not None:
                known.setdefault(_kind_of(facts[node.name], gpu), (node.name, gpu.calibration))

    def share(node: PlannedNode, gpu: PlannedGpu) -> PlannedGpu:
        found = known.get(_kind_of(facts[node.name], gpu))
        if gpu.calibration is not None or found is None:
            return gpu
        where, calibration = found
        return replace(
            gpu, calibration=calibration, measured_on="" if where == node.name else where
        )

    return tuple(replace(n, gpus=tuple(share(n, gpu) for gpu in n.gpus)) for n in nodes)


def _kind_of(facts: NodeFacts, gpu: PlannedGpu) -> tuple[object, ...]:
    """Return a key that is equal for devices of equal speed."""
    if gpu.device == "cpu":
        return ("CPU", facts.cpu or facts.hostname, facts.num_cores)
    # The power limit decides the clock under load; rounded, since drivers report fractions.
    return (gpu.name, gpu.memory_bytes, round(gpu.power_limit_w or 0.0, -1))


def _gpu(
    gpu: GpuFacts, sample: GpuSample | None, system: System, calibration: Calibration | None
) -> PlannedGpu:
    drawn = _count_drawn(sample)
    reserved = gpu.memory_reserved_bytes
    if reserved is None and drawn is not None:
        reserved = 0  # an old driver counts its reserved memory as used
    return PlannedGpu(
        name=gpu.name,
        device=f"cuda:{gpu.index}",
        memory_bytes=gpu.memory_bytes,
        reserved_bytes=reserved,
        desktop_bytes=guess_desktop(system) if drawn is None else drawn,
        power_limit_w=gpu.power_limit_w,
        capability=_capability(gpu.capability),
        calibration=calibration,
    )


def _count_drawn(sample: GpuSample | None) -> int | None:
    """Return the bytes in use on a GPU without those of computing processes; None: not known."""
    # A computing process, such as another run, will have ended when the planned run starts.
    used = sample.memory_used_bytes if sample else None
    if sample is None or used is None or not sample.process_ids:
        return used
    if sample.memory_computing_bytes is None:
        return None  # the driver in WSL does not report memory by process
    return max(0, used - sample.memory_computing_bytes)


def guess_desktop(system: System | None) -> int:
    """Return the GPU memory that a desktop typically holds on this system, in bytes."""
    return _WDDM_BYTES if system in ("windows", "wsl") else _DESKTOP_BYTES


def _capability(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _nominal_gbit(facts: NodeFacts, interface: str | None) -> float | None:
    """Return the speed of the training interface in Gb/s."""
    speeds = (found.speed_mbit for found in _list_used(facts, interface))
    return next((speed / 1000 for speed in speeds if speed), None)


def _is_wireless(facts: NodeFacts, interface: str | None) -> bool:
    """Return whether training uses Wi-Fi, by the names that Linux gives its devices."""
    return any(found.name.startswith("wl") for found in _list_used(facts, interface))


def _list_used(facts: NodeFacts, interface: str | None) -> list[InterfaceFacts]:
    """Return the training interface, by default the one with the node's address."""
    return [
        found
        for found in facts.interfaces
        if (found.name == interface if interface else found.address == facts.address)
    ]

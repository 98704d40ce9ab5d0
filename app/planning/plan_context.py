"""A request prepared for planning: the abilities of each GPU, computed once for all modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from agents.contract.parallel import ParallelMode
from agents.contract.spec import RunSpec, split_place
from app.planning.accuracy.learning import Correction
from app.planning.candidate import Candidate, GpuPlan, StepParts
from app.planning.hardware.cluster import (
    ASSUMED_DISK_BYTES_PER_S,
    Cluster,
    LinkSpeed,
    PlannedGpu,
    PlannedNode,
)
from app.planning.hardware.rates import Rates
from app.planning.hardware.ring import Orders, link_s
from app.planning.memory.forecast import (
    Fit,
    GpuMemory,
    MemoryForecast,
    MemorySetting,
    estimate_memory,
)
from app.planning.row_lengths import RowLengths
from app.planning.setting_search import choose_setting
from app.planning.shape.model_shape import ModelShape
from app.planning.throughput import ModelCost, PlannedPace

# Share of its power limit that a GPU draws while it computes and while it waits.
_BUSY_SHARE, _WAITING_SHARE = 0.9, 0.25
SEQUENCES_AT_ONCE = (8, 4, 2, 1)
"""Micro-batch sizes, in sequences, tried in turn in modes without a search by the trainer."""
# Latency of a collective between GPUs of one node, in seconds.
_LOCAL_LATENCY_S = 0.00002


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One GPU with its rates and corrections for this run."""

    node: PlannedNode
    gpu: PlannedGpu
    memory: GpuMemory
    rates: Rates
    pace: PlannedPace
    correction: Correction
    num_sharing: int = 1
    """Number of GPUs of its PC that take part and share RAM and SSD."""

    @property
    def host_bytes(self) -> int:
        """Host memory that this GPU may use for offloading, in bytes."""
        return self.node.free_ram_bytes // self.num_sharing

    @property
    def disk_bytes_per_s(self) -> float:
        """Reads from the PC's SSD while its other GPUs also read, in bytes per second."""
        return (self.node.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S) / self.num_sharing

    @property
    def place(self) -> tuple[str, str]:
        """PC and device."""
        return self.node.name, self.gpu.device

    @property
    def like(self) -> tuple[object, ...]:
        """Key of all that decides how it trains; equal cards share results in the cache."""
        card = (self.gpu.name, self.memory, self.host_bytes, self.disk_bytes_per_s)
        return (*card, self.rates, self.correction)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request with the inputs that all parallel modes share."""

    spec: RunSpec
    shape: ModelShape
    cluster: Cluster
    """Nodes that the spec names."""
    workers: tuple[Worker, ...]
    work: ModelCost
    rows: RowLengths
    """Lengths of the sequences, in tokens; of both answers together for preference pairs."""
    longest_tokens: int
    num_steps: int | None
    network_factor: float
    assumptions: tuple[str, ...]
    has_estimated_steps: bool = False
    fits: dict[tuple[object, ...], Fit] = field(default_factory=dict, repr=False, compare=False)
    """Cache of `fit`, by worker and number of ranks."""
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False, compare=False)
    """Results that candidates of one mode share, by a key of that mode."""

    @cached_property
    def orders(self) -> Orders:
        """Best orders of the PCs by their links."""
        return Orders(self.cluster, [node.name for node in self.cluster.nodes])

    @property
    def mean_tokens(self) -> float:
        """Mean length of a sequence, in tokens."""
        return self.rows.mean_tokens

    @property
    def step_tokens(self) -> float:
        """Tokens of the global batch."""
        return self.spec.batch_sequences * self.mean_tokens

    def of(self, names: Iterable[str]) -> tuple[Worker, ...]:
        """Return the GPUs of these nodes, in order."""
        wanted = set(names)
        return self.team(worker for worker in self.workers if worker.node.name in wanted)

    def team(self, workers: Iterable[Worker]) -> tuple[Worker, ...]:
        """Return GPUs that train together: in the order of their ranks, sharing their PCs' RAM."""
        some = tuple(workers)
        counts = Counter(worker.node.name for worker in some)
        if len(counts) > 2 and not self.keeps_order and not self.orders.is_uniform:
            ring = self.orders.ring(frozenset(counts))[0]
            # Any PC of a ring may come first: the first of the run file.
            first = ring.index(some[0].node.name)
            place = {name: number for number, name in enumerate((*ring[first:], *ring[:first]))}
            some = tuple(sorted(some, key=lambda worker: place[worker.node.name]))
        return tuple(
            worker
            if worker.num_sharing == counts[worker.node.name]
            else replace(worker, num_sharing=counts[worker.node.name])
            for worker in some
        )

    def is_demanded(self, workers: Iterable[Worker]) -> bool:
        """Return whether GPUs include every PC and GPU that the run file lists."""
        return meets_demand(self.spec, self.cluster, {worker.place for worker in workers})

    @property
    def keeps_order(self) -> bool:
        """True if ranks follow the run file, which gives each its share."""
        return self.spec.shares is not None

    def fit(self, worker: Worker, ranks: int) -> Fit:
        """Return the setting that the trainer will choose on this GPU as one of `ranks`."""
        key = (*worker.like, ranks)
        if key not in self.fits:
            self.fits[key] = self._fit(worker, ranks)
        return self.fits[key]

    def _fit(self, worker: Worker, ranks: int) -> Fit:
        found = self._choose(worker, worker.memory, ranks)
        factor = worker.correction.memory.value
        if factor == 1.0:
            return found
        more = int((factor - 1) * found.memory.allocated_bytes)
        # Past runs needed more than forecast, so the trainer would find less room: search again
        # with a card that is smaller by as much.
        if more > 0:
            room = found.room_bytes - found.memory.desktop_bytes
            smaller = replace(worker.memory, cap_bytes=max(1, room - more))
            found = replace(self._choose(worker, smaller, ranks), room_bytes=found.room_bytes)
        return replace(found, memory=correct(found.memory, factor))

    def _choose(self, worker: Worker, memory: GpuMemory, ranks: int) -> Fit:
        return choose_setting(
            self.shape,
            self.spec,
            longest_tokens=self.longest_tokens,
            mean_tokens=self.mean_tokens,
            gpu=memory,
            ranks=ranks,
            host_bytes=worker.host_bytes,
            bus_bytes_per_s=worker.rates.to_host_bytes_per_s,
            token_s=lambda setting: 1 / worker.pace.tokens_per_s(setting, self.rows, ranks=ranks),
        )

    def speed(self, worker: Worker, fit: Fit, ranks: int) -> float:
        """Return the tokens per second of a GPU, as one of `ranks`, while it computes."""
        pace = worker.pace.keep_unpacked(fit.unpacked_share)
        return pace.tokens_per_s(fit.setting, self.rows, ranks=ranks)

    def busy_s(self, worker: Worker, fit: Fit, num_rows: float, ranks: int) -> float:
        """Return the seconds of a step that a GPU needs for this number of rows."""
        pace = worker.pace.keep_unpacked(fit.unpacked_share)
        return pace.seconds(num_rows * self.mean_tokens, fit.setting, self.rows, ranks=ranks)

    def forecast(self, worker: Worker, setting: MemorySetting, ranks: int) -> MemoryForecast:
        """Forecast the memory of a given setting, corrected by past runs."""
        plain = estimate_memory(
            self.shape,
            self.spec,
            setting=setting,
            longest_tokens=self.longest_tokens,
            gpu=worker.memory,
            ranks=ranks,
        )
        return correct(plain, worker.correction.memory.value)

    def may_fit(self, worker: Worker) -> bool:
        """Return whether the setting that needs the least memory fits on a GPU alone."""
        num_layers = 0 if self.spec.recompute == "none" else self.shape.num_layers
        least = MemorySetting(micro_tokens=self.longest_tokens, num_recomputed=num_layers)
        needed = self.forecast(worker, least, 1).expected_bytes
        return needed <= worker.memory.room_bytes

    def room_bytes(self, worker: Worker) -> int:
        """Return the memory of a GPU that may be in use, other programs included, in bytes."""
        return self.fit(worker, 1).room_bytes

    def ring(self, workers: tuple[Worker, ...]) -> LinkSpeed:
        """Return the slowest link between neighbours in the ring of these GPUs."""
        names = list(dict.fromkeys(worker.node.name for worker in workers))
        if len(names) == 1:
            # GPUs of one PC exchange through host memory, so each byte crosses the bus twice.
            bus = min(worker.rates.from_host_bytes_per_s for worker in workers)
            return LinkSpeed(bytes_per_s=bus / 2, latency_s=_LOCAL_LATENCY_S, source="nominal")
        # Ranks of one node are neighbours in the ring, so each pair of nodes counts once.
        ring = names if self.keeps_order else self.orders.ring(frozenset(names))[0]
        pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
        # Every step of a ring waits for its slowest link.
        hops = list(pairs)
        one, other = max(hops, key=lambda pair: (link_s(self.cluster, *pair), *sorted(pair)))
        link = self.cluster.link(one, other)
        for uplink in self.cluster.uplinks:
            # A ring crosses a cable as often in one direction as in the other.
            num_shared = sum(uplink.divides(*hop) for hop in hops) / 2
            if num_shared > 1 and link.source != "measured":
                rate = uplink.bytes_per_s / num_shared
                link = replace(link, bytes_per_s=min(link.bytes_per_s, rate))
        return link

    def checkpoint_s(self, step_s: float, state_bytes: float, worker: Worker) -> float:
        """Return the seconds that copies of the state to host memory add to each step."""
        # Only the copy stalls training; a background thread writes it to disk.
        when, copy_s = self.spec.checkpoint, state_bytes / worker.rates.to_host_bytes_per_s
        by_time = copy_s * step_s / (when.every_minutes * 60) if when.every_minutes else 0.0
        return by_time + (copy_s / when.every_steps if when.every_steps else 0.0)

    def total_s(self, step_s: float) -> float | None:
        """Return the duration of the whole run in seconds; None: unknown number of steps."""
        return None if self.num_steps is None else self.num_steps * step_s

    def energy_wh(
        self, workers: tuple[Worker, ...], busy_s: list[float], step_s: float
    ) -> float | None:
        """Return the energy of the GPUs over the whole run, in watt-hours.

        Args:
            workers: GPUs that take part.
            busy_s: seconds of a step in which each GPU computes.
            step_s: duration of the whole step, in seconds.
        """
        powers = [worker.gpu.power_w for worker in workers]
        if self.num_steps is None or any(power is None for power in powers):
            return None
        joules = sum(
            (power or 0.0) * (_BUSY_SHARE * busy + _WAITING_SHARE * (step_s - busy))
            for power, busy in zip(powers, busy_s, strict=True)
        )
        return self.num_steps * joules / 3600


def meets_demand(spec: RunSpec, cluster: Cluster, places: Collection[tuple[str, str]]) -> bool:
    """Return whether devices include every PC and GPU that the run file lists.

    Args:
        spec: the run's spec.
        cluster: nodes that the spec names.
        places: node and device of each GPU that takes part.
    """
    gpus = [gpu for node in cluster.nodes for gpu in node.gpus]
    every = {(node.name, gpu.device) for node in cluster.nodes for gpu in node.gpus}
    # The speed of a CPU is hardly known before it is measured: none is left out for a guess.
    are_guessed = all(gpu.device == "cpu" for gpu in gpus) and any(
        gpu.calibration is None for gpu in gpus
    )
    if spec.shares is not None or (spec.nodes == "all" and are_guessed):
        return every <= set(places)
    if spec.nodes == "all":
        return True
    wanted = [split_place(entry) for entry in spec.nodes]
    names = {name for name, _ in places}
    return all(
        name in names if device is None else (name, device) in places for name, device in wanted
    )


def correct(memory: MemoryForecast, factor: float) -> MemoryForecast:
    """Return a forecast whose allocated memory is multiplied by `factor`."""
    more = int((factor - 1) * memory.allocated_bytes)
    return replace(memory, workspace_bytes=max(0, memory.workspace_bytes + more))


def gpu_plan(
    worker: Worker,
    fit: Fit,
    *,
    share: float,
    tokens_per_s: float,
    layers: tuple[int, int] | None = None,
) -> GpuPlan:
    """Return one GPU's part in a candidate."""
    return GpuPlan(
        node=worker.node.name,
        device=worker.gpu.device,
        card=worker.gpu.name,
        share=share,
        setting=fit.setting,
        memory=fit.memory,
        room_bytes=fit.room_bytes,
        tokens_per_s=tokens_per_s,
        layers=layers,
    )


def make_candidate(
    case: Case,
    mode: ParallelMode,
    workers: tuple[Worker, ...],
    gpus: tuple[GpuPlan, ...],
    parts: StepParts,
    busy: list[float],
    *,
    fits: bool = True,
) -> Candidate:
    """Return a candidate; it fits if all its GPUs fit and `fits` does not rule it out."""
    energy_wh = case.energy_wh(workers, busy, parts.total_s)
    total_s, pc_energy_wh, cost = case.total_s(parts.total_s), None, None
    if energy_wh is not None and total_s is not None:
        pcs = {worker.node.name: worker.node.power_w for worker in workers}
        pc_energy_wh = energy_wh + sum(pcs.values()) * total_s / 3600
        price = case.cluster.price_per_kwh
        cost = None if price is None else price * pc_energy_wh / 1000
    return Candidate(
        mode=mode,
        nodes=tuple(dict.fromkeys(worker.node.name for worker in workers)),
        gpus=gpus,
        fits=fits and all(gpu.fits for gpu in gpus),
        parts_s=parts,
        tokens_per_step=case.step_tokens,
        total_s=total_s,
        energy_wh=energy_wh,
        pc_energy_wh=pc_energy_wh,
        has_estimated_steps=case.has_estimated_steps,
        cost=cost,
        num_steps=case.num_steps,
    )

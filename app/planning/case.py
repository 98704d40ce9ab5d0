"""A question made ready: what each GPU can do, computed once and used by every way to train."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agents.spec import RunSpec
from app.planning.candidate import Candidate, GpuPlan, Mode, Question, StepParts
from app.planning.cluster import Cluster, Link, PlannedGpu, PlannedNode
from app.planning.learning import Correction
from app.planning.memory import (
    GIB,
    Fit,
    GpuMemory,
    MemoryForecast,
    Setting,
    estimate_memory,
)
from app.planning.model_shape import ModelShape
from app.planning.setting_search import choose_setting
from app.planning.throughput import (
    Pace,
    Rates,
    Work,
    arithmetic_share,
    find_rates,
    make_pace,
    measure_work,
)

_BUSY_SHARE, _WAITING_SHARE = 0.9, 0.25
"""Of its limit that a GPU draws while it computes, and while it waits."""
SEQUENCES_AT_ONCE = (8, 4, 2, 1)
"""That modes try which the trainer has no search for."""
_INSIDE_LATENCY_S = 0.00002
_PACKED_SHARE = 0.97
"""How full packs are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One GPU, and what is known of it for this run."""

    node: PlannedNode
    gpu: PlannedGpu
    memory: GpuMemory
    rates: Rates
    pace: Pace
    correction: Correction
    host_bytes: int
    """Of its PC's memory that it may use."""

    @property
    def like(self) -> tuple[object, ...]:
        """What decides how it trains: equal for equal cards."""
        card = (self.gpu.name, self.memory, self.host_bytes)
        return (*card, self.rates, self.correction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A question, its constants, and its GPUs."""

    spec: RunSpec
    shape: ModelShape
    cluster: Cluster
    """Of the nodes that the spec names."""
    workers: tuple[Worker, ...]
    work: Work
    mean_tokens: float
    """Of a sequence; of both together, where there are pairs."""
    longest_tokens: int
    num_steps: int | None
    network_factor: float
    assumptions: tuple[str, ...]
    fits: dict[tuple[object, ...], Fit] = field(default_factory=dict, repr=False, compare=False)
    """What was computed already."""

    @property
    def step_tokens(self) -> float:
        """Of the global batch."""
        return self.spec.batch_sequences * self.mean_tokens

    def of(self, names: Iterable[str]) -> tuple[Worker, ...]:
        """Return the GPUs of these PCs, in order."""
        wanted = set(names)
        return tuple(one for one in self.workers if one.node.name in wanted)

    def fit(self, worker: Worker, ranks: int) -> Fit:
        """Return what the trainer would choose on this GPU, as one of `ranks`."""
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
            token_s=lambda setting: 1 / worker.pace.tokens_per_s(setting, self.mean_tokens),
        )

    def forecast(self, worker: Worker, setting: Setting, ranks: int) -> MemoryForecast:
        """Return the memory of a given setting, with what past runs say."""
        plain = estimate_memory(
            self.shape,
            self.spec,
            setting=setting,
            longest_tokens=self.longest_tokens,
            gpu=worker.memory,
            ranks=ranks,
        )
        return correct(plain, worker.correction.memory.value)

    def room_bytes(self, worker: Worker) -> int:
        """Return what may be taken of a GPU, with what others hold."""
        return self.fit(worker, 1).room_bytes

    def ring(self, workers: tuple[Worker, ...]) -> Link:
        """Return a link as slow as the slowest between neighbours of the ring of these GPUs."""
        names = list(dict.fromkeys(worker.node.name for worker in workers))
        if len(names) == 1:
            bus = min(worker.rates.from_host_bytes_per_s for worker in workers)
            return Link(bytes_per_s=bus / 2, latency_s=_INSIDE_LATENCY_S, source="nominal")
        pairs = zip(names, [*names[1:], names[0]], strict=True)
        links = [self.cluster.link(one, other) for one, other in pairs]
        slowest = min(links, key=lambda link: link.bytes_per_s)
        return replace(slowest, latency_s=max(link.latency_s for link in links))

    def checkpoint_s(self, step_s: float, state_bytes: float, worker: Worker) -> float:
        """Return what copies of the state to host memory add to each step."""
        when, copy_s = self.spec.checkpoint, state_bytes / worker.rates.to_host_bytes_per_s
        by_time = copy_s * step_s / (when.every_minutes * 60) if when.every_minutes else 0.0
        return by_time + (copy_s / when.every_steps if when.every_steps else 0.0)

    def total_s(self, step_s: float) -> float | None:
        """Return the time of the whole run."""
        return None if self.num_steps is None else self.num_steps * step_s

    def energy_wh(
        self, workers: tuple[Worker, ...], busy_s: list[float], step_s: float
    ) -> float | None:
        """Return what the GPUs draw over the whole run.

        Args:
            workers: that take part.
            busy_s: of a step in which each of them computes.
            step_s: of the whole step.
        """
        powers = [worker.gpu.power_w for worker in workers]
        if self.num_steps is None or any(power is None for power in powers):
            return None
        joules = sum(
            (power or 0.0) * (_BUSY_SHARE * busy + _WAITING_SHARE * (step_s - busy))
            for power, busy in zip(powers, busy_s, strict=True)
        )
        return self.num_steps * joules / 3600


def correct(memory: MemoryForecast, factor: float) -> MemoryForecast:
    """Return a forecast with what past runs took more or less of what torch counts."""
    more = int((factor - 1) * memory.allocated_bytes)
    return replace(memory, workspace_bytes=max(0, memory.workspace_bytes + more))


def open_case(question: Question) -> Case:
    """Compute what all ways to train have in common."""
    spec, shape = question.spec, question.shape
    cluster = question.cluster
    if spec.nodes != "all":
        cluster = cluster.keep(spec.nodes)
    longest, mean, notes = _lengths(question)
    work = measure_work(shape, spec, _attended(question, mean))
    workers, more = _workers(question, cluster, work)
    return Case(
        spec=spec,
        shape=shape,
        cluster=cluster,
        workers=workers,
        work=work,
        mean_tokens=mean,
        longest_tokens=longest,
        num_steps=count_steps(question, mean),
        network_factor=question.learned.network.value,
        assumptions=(*notes, *more, *_link_notes(cluster)),
    )


def _lengths(question: Question) -> tuple[int, float, list[str]]:
    """Return the longest and the mean tokens of a sequence, and what was assumed of them."""
    spec, data = question.spec, question.data
    limit = spec.sequence_tokens * (2 if spec.objective == "dpo" else 1)
    if spec.packing:
        return limit, limit * _PACKED_SHARE, []
    notes = []
    if data.mean_tokens is None:
        notes.append(f"every row is taken to have {limit} tokens: the data was not counted")
    longest = min(limit, data.longest_tokens or limit)
    return longest, min(float(longest), data.mean_tokens or float(limit)), notes


def _attended(question: Question, mean_tokens: float) -> float:
    """Return how long a segment is that attention looks over."""
    if question.spec.packing:
        return min(mean_tokens, question.data.mean_tokens or mean_tokens)
    return mean_tokens / (2 if question.spec.objective == "dpo" else 1)


def count_steps(question: Question, mean_tokens: float) -> int | None:
    """Return the optimizer steps of the run; None: nothing says how many rows there are."""
    spec, data = question.spec, question.data
    if spec.max_steps is not None:
        return spec.max_steps
    if data.num_rows is None:
        return None
    sequences = float(data.num_rows)
    if spec.packing:
        sequences *= (data.mean_tokens or mean_tokens) / mean_tokens
    return max(1, math.ceil(max(1.0, sequences) * spec.epochs / spec.batch_sequences))


def _workers(
    question: Question, cluster: Cluster, work: Work
) -> tuple[tuple[Worker, ...], list[str]]:
    spec, family = question.spec, question.shape.family
    workers, notes = [], []
    cap = None if spec.memory_gib is None else int(spec.memory_gib * GIB)
    for node in cluster.nodes:
        for gpu in node.gpus:
            memory = gpu.memory
            if memory is None:
                notes.append(f"{node.name}: how much memory its {gpu.name} has is not known")
                continue
            rates = find_rates(gpu)
            learned = question.learned.find(
                gpu.name, family, spec.adapter.kind, is_calibrated=gpu.calibration is not None
            )
            share = arithmetic_share(spec, gpu)
            workers.append(
                Worker(
                    node=node,
                    gpu=gpu,
                    memory=replace(
                        memory, cap_bytes=cap, pieces_grow=node.system not in ("wsl", "windows")
                    ),
                    rates=rates,
                    pace=make_pace(work, rates, correction=learned.speed.value, share=share),
                    correction=learned,
                    host_bytes=node.free_ram_bytes // len(node.gpus),
                )
            )
    return tuple(workers), [*notes, *_rate_notes(workers)]


def _rate_notes(workers: list[Worker]) -> list[str]:
    """Return what the speeds rest on, once for each card."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        words = _rate_words(worker.rates, worker.correction)
        names = nodes.setdefault((worker.gpu.name, words), [])
        if words and worker.node.name not in names:
            names.append(worker.node.name)
    return [
        f"{', '.join(names)}: the speed of {card} {words}"
        for (card, words), names in nodes.items()
        if words
    ]


def _rate_words(rates: Rates, learned: Correction) -> str:
    if learned.speed.num_runs:
        return f"follows {learned.speed.reason}"
    if rates.source == "measured":
        return ""
    if rates.source == "assumed":
        return "is a guess until it is measured: it is in no table"
    return "is by its data sheet, not measured"


def _link_notes(cluster: Cluster) -> list[str]:
    names = [node.name for node in cluster.nodes]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    assumed = [pair for pair in pairs if cluster.link(*pair).source == "assumed"]
    if not assumed:
        return []
    where = " and ".join(assumed[0]) if len(assumed) == 1 else f"{len(assumed)} pairs of nodes"
    return [f"the network between {where} is taken to be Gigabit Ethernet: it was not measured"]


def gpu_plan(
    worker: Worker,
    fit: Fit,
    *,
    share: float,
    tokens_per_s: float,
    layers: tuple[int, int] | None = None,
) -> GpuPlan:
    """Return what one GPU does, in words that last."""
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


def with_checkpoint(parts: StepParts, seconds: float) -> StepParts:
    """Return the parts with those of checkpoints."""
    return replace(parts, checkpoint_s=seconds)


def make_candidate(
    case: Case,
    mode: Mode,
    workers: tuple[Worker, ...],
    gpus: tuple[GpuPlan, ...],
    parts: StepParts,
    busy: list[float],
    *,
    fits: bool = True,
) -> Candidate:
    """Return a candidate that fits if all its GPUs do, and `fits` is not against it."""
    return Candidate(
        mode=mode,
        nodes=tuple(dict.fromkeys(worker.node.name for worker in workers)),
        gpus=gpus,
        fits=fits and all(gpu.fits for gpu in gpus),
        parts_s=parts,
        tokens_per_step=case.step_tokens,
        total_s=case.total_s(parts.total_s),
        energy_wh=case.energy_wh(workers, busy, parts.total_s),
        num_steps=case.num_steps,
    )

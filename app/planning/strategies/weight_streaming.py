"""Plan weight streaming: frozen layers are copied to the GPU while others are computed.

They are kept in pinned host memory, or in files on the node's SSD if that is too small. Adapters
stay on the GPU, so nodes exchange the same gradients as in data parallel. A copy is hidden if a
micro-batch has enough tokens: bytes / bandwidth <= the time of a layer's forward pass. Inputs of
recomputed layers are in host memory, which allows many tokens at once on a small card.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agents.contract.layer_plan import MOST_TOKENS
from agents.contract.model_cut import Stage, WeightTier
from agents.contract.parallel import refuse_trained_weights
from app.planning.candidate import Candidate, GpuPlan, StepParts
from app.planning.memory.forecast import Fit, MemoryForecast, MemorySetting
from app.planning.memory.gpu import choose_width
from app.planning.plan_context import Case, Worker, gpu_plan, make_candidate
from app.planning.split import split_rows
from app.planning.strategies.data_parallel import choose_weights, exposed_s, save_s
from app.planning.subsets import (
    Team,
    compute_best,
    estimate_teams,
    fastest_together,
    list_teams,
    remember,
)

# Minimum number of layers on the GPU: the current one and those being copied.
_SLOTS = 3
# Micro-batch sizes to try, in sequences; a slow disk needs many tokens at once.
_AT_ONCE = (64, 32, 16, 8, 4, 2, 1)


def propose_streamed(case: Case, bar_s: float) -> Iterator[Candidate]:
    """Yield the plans of the fastest GPU alone, of the best teams, and of all GPUs."""
    if refuse_streamed(case):
        return

    @remember
    def rate(worker: Worker, num: int) -> tuple[float, float] | None:
        stream = _stream(case, worker, num, worker.num_sharing)
        if not (stream.fit.fits and stream.is_in_ram):
            return None
        rows = stream.count_at_once(case)
        micro_s = sum(stream.seconds(case, rows))
        return rows * case.mean_tokens / micro_s, micro_s

    teams = [team for team in list_teams(case, case.workers) if not _all_fit(case, team)]
    scored: list[tuple[float, Team]] = []
    for team in teams:
        alone = rate(team[0], 1) if len(team) == 1 else None
        if alone is not None:
            scored.append((case.step_tokens / alone[0], team))
    scored += estimate_teams(case, teams, rate)
    scored.sort(key=lambda one: (one[0], len(one[1]), [worker.place for worker in one[1]]))
    named = [one for one in scored if case.is_demanded(one[1])]
    found: list[Candidate] = []
    for some in (named, scored) if len(named) < len(scored) else (scored,):
        # Teams that cannot win are left out, but one is always shown.
        able = [one for one in some if one[0] <= bar_s] or some[:1]
        found += compute_best(case, able, lambda team: plan_streamed(case, team))
    yield from found
    seen = {frozenset((gpu.node, gpu.device) for gpu in one.gpus) for one in found}
    for workers in dict.fromkeys((case.team(case.workers), next(fastest_together(case)))):
        if frozenset(worker.place for worker in workers) not in seen:
            candidate = plan_streamed(case, workers)
            if candidate is not None:
                yield candidate


def _all_fit(case: Case, workers: tuple[Worker, ...]) -> bool:
    """Return whether streaming only costs time, since all GPUs hold the model and its activations.

    Where activations are offloaded, streaming weights instead may be faster.
    """
    # A run file may ask for it nevertheless.
    # Alone first: the search is cached by the number of ranks, and one that fails decides.
    fits = (case.fit(worker, ranks) for ranks in (1, len(workers)) for worker in workers)
    return case.spec.parallel != "streamed" and all(
        fit.fits and not fit.setting.num_moved for fit in fits
    )


def plan_streamed(case: Case, workers: tuple[Worker, ...]) -> Candidate | None:
    """Return the plan that streams frozen layers; None: needless, since all fit, or impossible."""
    if refuse_streamed(case):
        return None
    if _all_fit(case, workers):
        return None
    sharing = Counter(worker.node.name for worker in workers)
    streams = [_stream(case, one, len(workers), sharing[one.node.name]) for one in workers]
    fits = [stream.fit for stream in streams]
    speeds = [stream.tokens_per_s for stream in streams]
    rows = split_rows(case.spec.batch_sequences, choose_weights(case, speeds))
    times = [stream.seconds(case, count) for stream, count in zip(streams, rows, strict=True)]
    slowest = max(range(len(times)), key=lambda place: sum(times[place]))
    parts = StepParts(
        compute_s=times[slowest][0],
        input_s=times[slowest][1],
        network_s=exposed_s(case, workers, fits, [sum(time) for time in times]),
        optimizer_s=max(worker.pace.optimizer_s for worker in workers),
    )
    parts = replace(parts, checkpoint_s=save_s(case, parts, workers))
    gpus = tuple(
        replace(
            gpu_plan(
                stream.worker,
                stream.fit,
                share=count / case.spec.batch_sequences,
                tokens_per_s=stream.tokens_per_s,
            ),
            layers=(0, case.shape.num_layers),
            num_streamed=stream.num_layers,
            streams_from=stream.tier if stream.num_layers else None,
            host_bytes=stream.host_bytes,
            host_room_bytes=stream.worker.host_bytes,
            why_little_ram=stream.worker.node.why_little_ram,
        )
        for stream, count in zip(streams, rows, strict=True)
    )
    busy = [time[0] for time in times]
    return make_candidate(case, "streamed", workers, gpus, parts, busy)


def screen_streamed(case: Case) -> Callable[[tuple[Worker, ...]], bool]:
    """Return a quick test of whether some GPUs can stream."""
    # A GPU that cannot stream alone cannot do so with others, and a plan over many takes long.
    streaming: dict[tuple[object, ...], bool] = {}

    def may_stream(worker: Worker) -> bool:
        if worker.like not in streaming:
            alone = plan_streamed(case, (worker,))
            streaming[worker.like] = alone is None or alone.fits
        return streaming[worker.like]

    return lambda workers: all(may_stream(worker) for worker in workers)


def make_streamed_stage(candidate: Candidate, gpu: GpuPlan, rank: int, num_layers: int) -> Stage:
    """Return a rank's stage: all layers, with the number of those that stay on the GPU."""
    # The memory of a CPU is the RAM, so copying there gains nothing.
    num_resident = None if gpu.device == "cpu" else num_layers - gpu.num_streamed
    return Stage(
        rank=rank,
        replica=rank,
        first_layer=0,
        stop_layer=num_layers,
        num_resident=num_resident,
        streams_from=gpu.streams_from,
    )


def refuse_streamed(case: Case) -> str:
    """Return why weights of this run cannot be streamed; empty: they can."""
    if case.shape.shares_layers:
        return (
            f"Layers of models of the family {case.shape.family} cannot be streamed: they share "
            "weights"
        )
    refusal = refuse_trained_weights("streamed", case.spec.adapter.kind)
    return refusal[0] if refusal else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """One GPU that streams some of its layers."""

    worker: Worker
    fit: Fit
    num_layers: int
    """Number of streamed layers."""
    tier: WeightTier
    host_bytes: int
    """Host memory of offloaded inputs and of this GPU's equal part of the node's streamed weights,
    in bytes."""
    copy_s: float
    """Duration of one copy of all streamed layers, in seconds."""
    tokens_per_s: float

    @property
    def is_in_ram(self) -> bool:
        """True if the PC has enough RAM."""
        return self.host_bytes <= self.worker.host_bytes

    def count_at_once(self, case: Case) -> int:
        """Return the number of rows of a micro-batch."""
        return max(1, int(self.fit.setting.micro_tokens / case.mean_tokens))

    def seconds(self, case: Case, rows: int) -> tuple[float, float]:
        """Return the seconds of a step spent computing, and those spent waiting for weights."""
        compute_s = case.busy_s(self.worker, self.fit, rows, 1)
        if not rows:
            return 0.0, 0.0
        num_passes = math.ceil(rows / self.count_at_once(case))
        each_s = compute_s / num_passes
        # The forward pass takes about a third of a micro-batch's time. In each pass the copy of a
        # layer is hidden behind the computation of the one before it.
        waits = max(0.0, self.copy_s - each_s / 3) + max(0.0, self.copy_s - each_s * 2 / 3)
        return compute_s, waits * num_passes


def _stream(case: Case, worker: Worker, ranks: int, sharing: int) -> _Stream:
    """Return the fastest stream over several micro-batch sizes, activations kept or recomputed.

    `sharing` is the number of GPUs of the node, which share one copy of the layers in RAM.
    """
    rows = max(1, case.spec.batch_sequences // ranks)
    # Each takes a search, and equal cards have equal streams.
    key = ("stream", worker.like, rows, ranks > 1, sharing)
    if key not in case.known:
        case.known[key] = _search(case, worker, rows, ranks, sharing)
    known: _Stream = case.known[key]
    return replace(known, worker=worker)


def _search(case: Case, worker: Worker, rows: int, ranks: int, sharing: int) -> _Stream:
    num_layers = case.shape.num_layers
    again = (num_layers,) if case.spec.recompute == "all" else (0, num_layers)
    tried = [
        _try(
            case,
            worker,
            ranks,
            sharing,
            MemorySetting(micro_tokens=num * case.longest_tokens, num_recomputed=n),
        )
        for num in _AT_ONCE
        if num == 1 or (num <= rows and num * case.longest_tokens <= MOST_TOKENS)
        for n in again
    ]
    fitting = [one for one in tried if one.fit.fits and one.is_in_ram]
    if not fitting:
        return min(tried, key=lambda one: one.fit.memory.expected_bytes)
    return min(fitting, key=lambda one: sum(one.seconds(case, rows)))


def _try(case: Case, worker: Worker, ranks: int, sharing: int, setting: MemorySetting) -> _Stream:
    """Return the stream that keeps as many layers on the GPU as fit with this setting."""
    key = ("try", worker.like, setting, ranks > 1, sharing)
    if key not in case.known:
        case.known[key] = _keep_most(case, worker, ranks, sharing, setting)
    found: _Stream = case.known[key]
    return found


def _keep_most(
    case: Case, worker: Worker, ranks: int, sharing: int, setting: MemorySetting
) -> _Stream:
    room, num_layers = case.room_bytes(worker), case.shape.num_layers
    forecast = case.forecast(worker, setting, ranks)
    # The buffers of the current layers stay on the GPU in any case.
    streamed = min(_num_streamed(case, forecast, room), max(0, num_layers - _SLOTS))
    weights, constants = _layer_bytes(case, forecast)
    memory = replace(
        forecast,
        weights_bytes=forecast.weights_bytes - int(streamed * weights),
        constants_bytes=forecast.constants_bytes - int(streamed * constants),
    )
    copied = streamed * (weights + constants)
    fit = Fit(setting=setting, memory=memory, room_bytes=room)
    inputs = _count_inputs(case, worker, setting)
    is_in_ram = (
        copied <= worker.node.streamed_ram_bytes and copied / sharing + inputs <= worker.host_bytes
    )
    tier: WeightTier = "ram" if is_in_ram else "disk"
    bus = worker.rates.from_host_bytes_per_s
    # From a file, only the layers being copied are in host memory.
    waiting = copied / sharing if tier == "ram" else min(streamed, _SLOTS) * (weights + constants)
    return _Stream(
        worker=worker,
        fit=fit,
        num_layers=streamed,
        tier=tier,
        host_bytes=int(waiting + inputs),
        copy_s=copied / (bus if tier == "ram" else min(bus, worker.disk_bytes_per_s)),
        tokens_per_s=case.speed(worker, fit, ranks),
    )


def _count_inputs(case: Case, worker: Worker, setting: MemorySetting) -> float:
    """Return the bytes of recomputed layers' inputs, which are offloaded to host memory."""
    width = choose_width(case.spec, worker.memory)
    return float(setting.num_recomputed * setting.micro_tokens * case.shape.hidden * width)


def _layer_bytes(case: Case, forecast: MemoryForecast) -> tuple[float, float]:
    """Return the bytes of a layer's weights and of their quantization constants."""
    # Embedding and head are in 16 bits and never streamed.
    ends = 2.0 * (case.shape.num_embedding + case.shape.num_head)
    num = case.shape.num_layers
    return (forecast.weights_bytes - ends) / num, forecast.constants_bytes / num


def _num_streamed(case: Case, forecast: MemoryForecast, room_bytes: int) -> int:
    over = forecast.expected_bytes - room_bytes
    return max(0, math.ceil(over / sum(_layer_bytes(case, forecast))))

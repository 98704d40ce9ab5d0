"""Plan modes that shard weights, gradients and optimizer state: FSDP2 and DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from agents.contract.parallel import ParallelMode
from app.planning.candidate import Candidate, StepParts
from app.planning.hardware.network import gather_s, gradient_bytes, hide, ring_s, statistics_s
from app.planning.memory.forecast import Fit, MemoryForecast, MemorySetting, estimate_memory
from app.planning.plan_context import SEQUENCES_AT_ONCE, Case, Worker, gpu_plan, make_candidate
from app.planning.split import split_rows
from app.planning.strategies.data_parallel import choose_weights, save_s


def propose_sharded(case: Case, bar_s: float) -> Iterator[Candidate]:
    """Yield the FSDP2 plan of all GPUs, which shards everything."""
    if len(case.workers) > 1:
        yield plan_sharded(case, case.team(case.workers), stage=3, mode="sharded")


def propose_deepspeed(case: Case, bar_s: float) -> Iterator[Candidate]:
    """Yield the plans of all GPUs with the three ZeRO stages."""
    if len(case.workers) > 1:
        for stage in (1, 2, 3):
            yield plan_sharded(case, case.team(case.workers), stage=stage, mode="deepspeed")


def gathering_s(case: Case, candidate: Candidate) -> float:
    """Return the seconds of a step in which a fully sharded plan keeps the network busy."""
    rows = [round(gpu.share * case.spec.batch_sequences) for gpu in candidate.gpus]
    settings = [gpu.setting for gpu in candidate.gpus]
    return wire_s(case, case.of(candidate.nodes), settings, rows, 3)


def plan_sharded(
    case: Case, workers: tuple[Worker, ...], *, stage: int, mode: ParallelMode
) -> Candidate:
    """Return the plan that shards optimizer state (1), gradients (2) and weights (3).

    ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). With stage 3 every micro-batch gathers all
    weights twice, and all GPUs run the same number of them.
    """
    num = len(workers)
    fits = [_shard(case, worker, num, stage) for worker in workers]
    speeds = [case.speed(worker, fit, num) for worker, fit in zip(workers, fits, strict=True)]
    # DeepSpeed supports equal shares only.
    weights = [1.0] * num if mode == "deepspeed" else choose_weights(case, speeds)
    rows = split_rows(case.spec.batch_sequences, weights)
    busy = [
        case.busy_s(worker, fit, count, num)
        for worker, fit, count in zip(workers, fits, rows, strict=True)
    ]
    parts = StepParts(
        compute_s=max(busy),
        network_s=_sharded_network_s(case, workers, fits, rows, busy, stage),
        optimizer_s=max(worker.pace.optimizer_s for worker in workers) / num,
    )
    gpus = tuple(
        gpu_plan(worker, fit, share=count / case.spec.batch_sequences, tokens_per_s=speed)
        for worker, fit, count, speed in zip(workers, fits, rows, speeds, strict=True)
    )
    parts = replace(parts, checkpoint_s=save_s(case, parts, workers) / num)
    return make_candidate(case, mode, workers, gpus, parts, busy)


def _shard(case: Case, worker: Worker, num: int, stage: int) -> Fit:
    """Return the setting that fits: the trainer's own choice, else the largest micro-batch."""
    # The largest, because with stage 3 each micro-batch gathers all weights.
    num_layers = case.shape.num_layers
    own = case.fit(worker, num)
    if stage < 3 and own.fits:
        return replace(own, memory=_cut_state(own.memory, num, num_layers, stage))
    fit = own
    for sequences in SEQUENCES_AT_ONCE:
        if sequences == 1 or sequences * num <= case.spec.batch_sequences:
            tokens = sequences * case.longest_tokens
            setting = MemorySetting(micro_tokens=tokens, num_recomputed=num_layers)
            memory = _cut_state(case.forecast(worker, setting, num), num, num_layers, stage)
            fit = Fit(setting=setting, memory=memory, room_bytes=own.room_bytes)
            if fit.fits:
                break
    return fit


def _cut_state(whole: MemoryForecast, num: int, num_layers: int, stage: int) -> MemoryForecast:
    memory = replace(whole, optimizer_bytes=whole.optimizer_bytes // num)
    if stage >= 2:
        memory = replace(memory, gradients_bytes=whole.gradients_bytes // num)
    if stage >= 3:
        # Two layers are gathered in full: the current one and the next.
        gathered = 2 * (whole.weights_bytes + whole.constants_bytes) // num_layers
        memory = replace(
            memory,
            weights_bytes=whole.weights_bytes // num,
            constants_bytes=whole.constants_bytes // num,
            adapter_bytes=whole.adapter_bytes // num,
            communication_bytes=whole.communication_bytes + gathered,
        )
    return memory


def wire_s(
    case: Case,
    workers: tuple[Worker, ...],
    settings: list[MemorySetting],
    rows: list[int],
    stage: int,
) -> float:
    """Return the seconds of a step in which the network is busy, hidden or not."""
    num = len(workers)
    link = case.ring(workers)
    gradients_s = ring_s(gradient_bytes(case.shape, case.spec), link, num)
    if stage < 3:
        return gradients_s * case.network_factor
    memory = estimate_memory(
        case.shape,
        case.spec,
        setting=settings[0],
        longest_tokens=case.longest_tokens,
        gpu=workers[0].memory,
        ranks=num,
    )
    all_bytes = memory.weights_bytes + memory.constants_bytes
    if case.spec.adapter.kind == "full":
        all_bytes //= 2  # fp32 values travel as bf16
    micro = max(_num_micro(case, one, count) for one, count in zip(settings, rows, strict=True))
    gather = 2 * micro * gather_s(all_bytes, link, num)
    # Sharded gradients are only reduced and scattered, which is half of an all-reduce.
    return (gradients_s / 2 + gather) * case.network_factor


def _num_micro(case: Case, setting: MemorySetting, rows: int) -> int:
    at_once = max(1, int(setting.micro_tokens / case.mean_tokens))
    return math.ceil(rows / at_once)


def _sharded_network_s(
    case: Case,
    workers: tuple[Worker, ...],
    fits: list[Fit],
    rows: list[int],
    busy: list[float],
    stage: int,
) -> float:
    """Return the seconds of a step spent waiting for the network."""
    settings = [fit.setting for fit in fits]
    seconds = wire_s(case, workers, settings, rows, stage)
    link, num = case.ring(workers), len(workers)
    if stage < 3:
        micro = max(_num_micro(case, *pair) for pair in zip(settings, rows, strict=True))
        waited_s = hide(seconds, min(busy) / max(1, micro))
    else:
        # A layer is gathered while the one before it is computed; the first is always waited for.
        waited_s = max(seconds / case.shape.num_layers, seconds - min(busy))
    return waited_s + statistics_s(link, num)

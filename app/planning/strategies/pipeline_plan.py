"""Plan a pipeline: layers are spread over GPUs, and each micro-batch passes through all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.planning.candidate import Candidate, GpuPlan, StepParts
from app.planning.memory.forecast import (
    Fit,
    MemoryForecast,
    MemorySetting,
    choose_dtype,
    estimate_memory,
)
from app.planning.plan_context import Case, Worker, correct, gpu_plan, make_candidate
from app.planning.strategies.pipeline_schedule import bounds_of, split_layers, time_pipeline
from app.planning.subsets import fastest_together
from app.planning.throughput import ModelCost, PlannedPace, arithmetic_share, make_pace

# Bytes of one value in each data type.
_WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# Parts of a GPU's memory that a pipeline divides among its stages.
_SPLIT_PARTS = ("weights", "constants", "adapter", "gradients", "optimizer")
# A smaller chain is tried only where its memory exceeds those parts by this factor: activations,
# the CUDA context and uneven stages need the rest.
_ROOM_FACTOR = 1.3


def propose_pipeline(case: Case) -> Iterator[Candidate]:
    """Yield the pipeline over all GPUs, and the shortest one whose memory may suffice."""
    for workers in _chains(case):
        candidate = plan_pipeline(case, workers)
        if candidate is not None:
            yield candidate


def _chains(case: Case) -> Iterator[tuple[Worker, ...]]:
    yield case.workers
    need = sum(case.fit(case.workers[0], 1).memory.parts[part] for part in _SPLIT_PARTS)
    for names in fastest_together(case):
        workers = case.of(names)
        room = sum(case.room_bytes(worker) for worker in workers)
        if 1 < len(workers) < len(case.workers) and room > _ROOM_FACTOR * need:
            yield workers
            return


def plan_pipeline(case: Case, workers: tuple[Worker, ...]) -> Candidate | None:
    """Return the plan with one stage on each GPU, in order; None: fewer layers than GPUs.

    Micro-batches have one sequence each, since more micro-batches make the bubble smaller. All
    layers keep their activations if that fits, else all of them recompute.
    """
    if not 1 < len(workers) <= case.shape.num_layers:
        return None
    kept = _plan(case, workers, again=False) if case.spec.recompute != "all" else None
    if kept is not None and kept.fits:
        return kept
    return _plan(case, workers, again=True)


def _plan(case: Case, workers: tuple[Worker, ...], *, again: bool) -> Candidate | None:
    num, num_layers, tokens = len(workers), case.shape.num_layers, case.mean_tokens
    paces = [stage_pace(case, worker, 1, has_head=False) for worker in workers]
    # A stage of no layers: what is left is the time of the head.
    head_s = _micro_s(stage_pace(case, workers[-1], 0, has_head=True), tokens, again=False)
    layer_s = [_micro_s(pace, tokens, again=again) for pace in paces]
    most = [
        _most_layers(case, worker, place, num, again=again) for place, worker in enumerate(workers)
    ]
    counts = split_layers(num_layers, layer_s, most, (0.0, head_s))
    fits = counts is not None
    if counts is None:
        # Planned by speed alone, so that the plan can show how much memory is missing.
        counts = split_layers(num_layers, layer_s, [num_layers] * num, (0.0, head_s))
    if counts is None:
        return None
    stages_s = [count * one for count, one in zip(counts, layer_s, strict=True)]
    stages_s[-1] += head_s
    gpus = _stages(case, workers, counts, stages_s, again=again)
    return _assemble(case, workers, gpus, stages_s, fits=fits)


def _assemble(
    case: Case,
    workers: tuple[Worker, ...],
    gpus: tuple[GpuPlan, ...],
    stages_s: list[float],
    *,
    fits: bool,
) -> Candidate:
    num_micro, num = case.spec.batch_sequences, len(workers)
    transfers = [_transfer_s(case, workers[i], workers[i + 1]) for i in range(num - 1)]
    time = time_pipeline(stages_s, transfers, num_micro)
    parts = StepParts(
        compute_s=time.compute_s,
        bubble_s=time.bubble_s,
        network_s=time.network_s,
        optimizer_s=max(
            worker.pace.optimizer_s * gpu.share for worker, gpu in zip(workers, gpus, strict=True)
        ),
    )
    busy = [num_micro * stage for stage in stages_s]
    return make_candidate(case, "pipeline", workers, gpus, parts, busy, fits=fits)


def _stages(
    case: Case,
    workers: tuple[Worker, ...],
    counts: Sequence[int],
    stages_s: list[float],
    *,
    again: bool,
) -> tuple[GpuPlan, ...]:
    plans = []
    for place, (worker, layers) in enumerate(zip(workers, bounds_of(counts), strict=True)):
        num = layers[1] - layers[0]
        fit = Fit(
            setting=_setting(case, num, again=again),
            memory=stage_memory(case, worker, num, place, len(workers), again=again),
            room_bytes=case.room_bytes(worker),
        )
        speed = case.mean_tokens / stages_s[place]
        share = num / case.shape.num_layers
        plans.append(gpu_plan(worker, fit, share=share, tokens_per_s=speed, layers=layers))
    return tuple(plans)


def _setting(case: Case, num_layers: int, *, again: bool) -> MemorySetting:
    return MemorySetting(
        micro_tokens=case.longest_tokens, num_recomputed=num_layers if again else 0
    )


def _transfer_s(case: Case, one: Worker, other: Worker) -> float:
    """Return the seconds that a micro-batch's features take from one stage to the next."""
    width = _WIDTHS[choose_dtype(case.spec, one.memory)]
    link = case.ring((one, other))
    return case.mean_tokens * case.shape.hidden * width / link.bytes_per_s + link.latency_s / 2


def stage_pace(case: Case, worker: Worker, num_layers: int, *, has_head: bool) -> PlannedPace:
    """Return the time of passes over one stage."""
    part = num_layers / case.shape.num_layers
    work = case.work
    stage = ModelCost(
        layer_flops=work.layer_flops * part,
        layer_again_flops=work.layer_again_flops * part,
        lost_flops=work.lost_flops * part,
        lost_again_flops=work.lost_again_flops * part,
        attention_flops=work.attention_flops * part,
        attention_again_flops=work.attention_again_flops * part,
        head_flops=work.head_flops if has_head else 0.0,
        head_weight_bytes=work.head_weight_bytes if has_head else 0.0,
        logit_bytes=work.logit_bytes if has_head else 0.0,
        traffic_bytes=work.traffic_bytes * part,
        traffic_again_bytes=work.traffic_again_bytes * part,
        operand_bytes=work.operand_bytes * part,
        operand_again_bytes=work.operand_again_bytes * part,
        weight_bytes=work.weight_bytes * part,
        quantized_values=work.quantized_values * part,
        num_unpacked=work.num_unpacked,
        num_layers=num_layers,
        launch_s=work.launch_s * part,
        launch_again_s=work.launch_again_s * part,
        trained_values=work.trained_values,
        step_bytes=work.step_bytes * part,
    )
    share = arithmetic_share(case.spec, worker.gpu)
    return make_pace(stage, worker.rates, correction=worker.correction.speed.value, share=share)


def _micro_s(pace: PlannedPace, tokens: float, *, again: bool) -> float:
    computing_s, launching_s = tokens * pace.token_s + pace.pass_s, pace.launch_s
    if again:
        computing_s += tokens * pace.again_s + pace.again_pass_s
        launching_s += pace.launch_again_s
    return max(computing_s, launching_s)


def _most_layers(case: Case, worker: Worker, place: int, num_stages: int, *, again: bool) -> int:
    """Return how many layers fit a stage, from the memory of one and of two layers."""
    one, two = (
        stage_memory(case, worker, count, place, num_stages, again=again).expected_bytes
        for count in (1, 2)
    )
    left = case.room_bytes(worker) - one
    return 0 if left < 0 else 1 + int(left / max(1, two - one))


def stage_memory(
    case: Case,
    worker: Worker,
    num_layers: int,
    place: int,
    num_stages: int,
    *,
    again: bool = True,
) -> MemoryForecast:
    """Forecast the memory of a stage: its layers, its end of the model, micro-batches in flight.

    The first of seven stages has up to seven micro-batches in flight, the last has one.
    """
    shape, spec = case.shape, case.spec
    stage = replace(shape, layers=shape.layers[:num_layers])
    whole = estimate_memory(
        stage,
        spec,
        setting=_setting(case, num_layers, again=again),
        longest_tokens=case.longest_tokens,
        gpu=worker.memory,
        ranks=num_stages,
        inputs_stay=True,
        has_head=place == num_stages - 1,
    )
    in_flight = min(num_stages - place, spec.batch_sequences)
    is_first, is_last = place == 0, place == num_stages - 1
    gone = (0 if is_first else shape.num_embedding) + (0 if is_last else shape.num_head)
    # Tied weights are needed at both ends, so neither stage saves them.
    if shape.is_tied and (is_first or is_last):
        gone = 0
    full = spec.adapter.kind == "full"
    width = 4 if full else _WIDTHS[choose_dtype(spec, worker.memory)]
    # Bytes per value; paged states are in host memory.
    states = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}[spec.optimizer]
    memory = replace(
        whole,
        weights_bytes=whole.weights_bytes - gone * width,
        gradients_bytes=whole.gradients_bytes - (4 * gone if full else 0),
        optimizer_bytes=max(0, whole.optimizer_bytes - (states * gone if full else 0)),
        # If layers recompute, only the micro-batch in its backward pass holds activations.
        activations_bytes=whole.activations_bytes * (1 if again else in_flight),
        inputs_bytes=whole.inputs_bytes * in_flight,
        loss_bytes=whole.loss_bytes if is_last else 0,
    )
    return correct(memory, worker.correction.memory.value)

"""Plan weight streaming: frozen layers are copied from host memory while others are computed.

Adapters stay on the GPU, so nodes exchange the same as in data parallel. A copy is hidden if a
micro-batch has enough tokens: bytes / bandwidth <= the time of a layer's forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from app.planning.candidate import Candidate, StepParts
from app.planning.memory.forecast import Fit, MemoryForecast, MemorySetting
from app.planning.plan_context import SEQUENCES_AT_ONCE, Case, Worker, gpu_plan, make_candidate
from app.planning.strategies.data_parallel import choose_weights, exposed_s, save_s, split_rows
from app.planning.subsets import fastest_together

# Minimum number of layers on the GPU while one is computed and the next is copied.
_SLOTS = 3


def propose_streamed(case: Case) -> Iterator[Candidate]:
    """Yield the plans of the fastest node alone and of all nodes."""
    together = [case.of(names) for names in fastest_together(case)]
    for workers in dict.fromkeys((together[0], together[-1])):
        candidate = plan_streamed(case, workers)
        if candidate is not None:
            yield candidate


def plan_streamed(case: Case, workers: tuple[Worker, ...]) -> Candidate | None:
    """Return the plan that streams frozen layers; None: all layers fit, or none is frozen."""
    if case.spec.adapter.kind == "full":
        return None
    if all(case.fit(worker, len(workers)).fits for worker in workers):
        return None
    # Equal cards give equal results, and each one takes a search.
    found_for: dict[tuple[object, ...], _Stream] = {}
    streams = []
    for worker in workers:
        if worker.like not in found_for:
            found_for[worker.like] = _stream(case, worker, len(workers))
        streams.append(replace(found_for[worker.like], worker=worker))
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
        gpu_plan(worker, fit, share=count / case.spec.batch_sequences, tokens_per_s=speed)
        for worker, fit, count, speed in zip(workers, fits, rows, speeds, strict=True)
    )
    busy = [time[0] for time in times]
    ram_fits = all(stream.host_bytes <= stream.worker.host_bytes for stream in streams)
    found = make_candidate(case, "streamed", workers, gpus, parts, busy)
    return found if ram_fits else replace(found, fits=False, reason=_ram_reason(streams))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """One GPU that streams some of its layers."""

    worker: Worker
    fit: Fit
    host_bytes: int
    """Host memory of the streamed weights, in bytes."""
    copy_s: float
    """One copy of all streamed layers, in seconds."""
    tokens_per_s: float

    def seconds(self, case: Case, rows: int) -> tuple[float, float]:
        """Return the seconds of a step spent computing, and those spent waiting for weights.

        The forward pass takes about a third of a micro-batch's time, the backward pass the rest;
        the copy of a layer is hidden behind the computation of the one before it.
        """
        compute_s = case.busy_s(self.worker, self.fit, rows, 1)
        if not rows:
            return 0.0, 0.0
        at_once = max(1, int(self.fit.setting.micro_tokens / case.mean_tokens))
        num_passes = math.ceil(rows / at_once)
        each_s = compute_s / num_passes
        waits = max(0.0, self.copy_s - each_s / 3) + max(0.0, self.copy_s - each_s * 2 / 3)
        return compute_s, waits * num_passes


def _stream(case: Case, worker: Worker, ranks: int) -> _Stream:
    """Return the fastest of some micro-batch sizes, with activations kept or recomputed."""
    rows = max(1, case.spec.batch_sequences // ranks)
    num_layers = case.shape.num_layers
    again = (num_layers,) if case.spec.recompute == "all" else (0, num_layers)
    tried = [
        _try(
            case,
            worker,
            ranks,
            MemorySetting(micro_tokens=num * case.longest_tokens, num_recomputed=n),
        )
        for num in SEQUENCES_AT_ONCE
        if num <= rows
        for n in again
    ]
    return min(tried, key=lambda one: (not one.fit.fits, sum(one.seconds(case, rows))))


def _try(case: Case, worker: Worker, ranks: int, setting: MemorySetting) -> _Stream:
    """Return the stream that keeps as many layers on the GPU as fit with this setting."""
    room, num_layers = case.room_bytes(worker), case.shape.num_layers
    forecast = case.forecast(worker, setting, ranks)
    streamed = min(_num_streamed(case, forecast, room), max(0, num_layers - _SLOTS))
    weights, constants = _layer_bytes(case, forecast)
    memory = replace(
        forecast,
        weights_bytes=forecast.weights_bytes - int(streamed * weights),
        constants_bytes=forecast.constants_bytes - int(streamed * constants),
    )
    copied = streamed * (weights + constants)
    fit = Fit(setting=setting, memory=memory, room_bytes=room)
    return _Stream(
        worker=worker,
        fit=fit,
        host_bytes=int(copied),
        copy_s=copied / worker.rates.from_host_bytes_per_s,
        tokens_per_s=case.speed(worker, fit, ranks),
    )


def _layer_bytes(case: Case, forecast: MemoryForecast) -> tuple[float, float]:
    """Return the bytes of a layer's weights and of their quantization constants."""
    ends = 2.0 * (case.shape.num_embedding + case.shape.num_head)
    num = case.shape.num_layers
    return (forecast.weights_bytes - ends) / num, forecast.constants_bytes / num


def _num_streamed(case: Case, forecast: MemoryForecast, room_bytes: int) -> int:
    over = forecast.expected_bytes - room_bytes
    return max(0, math.ceil(over / sum(_layer_bytes(case, forecast))))


def _ram_reason(streams: list[_Stream]) -> str:
    short = next(one for one in streams if one.host_bytes > one.worker.host_bytes)
    needed, there = short.host_bytes / 2**30, short.worker.host_bytes / 2**30
    return (
        f"streamed weights: {short.worker.node.name} needs {needed:.0f} GiB of RAM and "
        f"has {there:.0f} to spare"
    )

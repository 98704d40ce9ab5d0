"""A believable plan for the fake cluster: three candidates, of which one cannot be trained yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.planning.candidate import Advice, Candidate, GpuPlan, Plan, StepParts
from app.planning.forecast_accuracy import (
    Forecast,
    ForecastComparison,
    Measured,
    RankForecast,
    RankMeasured,
)
from app.planning.memory.forecast import MemoryForecast, MemorySetting

GIB = 1024**3
MIB = 1024**2
CARDS = (
    ("alpha", "cuda:0", "NVIDIA GeForce RTX 5070 Ti", 16, 0.36, 1510.0),
    ("beta", "cuda:0", "NVIDIA GeForce RTX 3090", 24, 0.25, 1060.0),
    ("beta", "cuda:1", "NVIDIA GeForce RTX 3090", 24, 0.25, 1055.0),
    ("gamma", "cuda:0", "NVIDIA GeForce RTX 4070 Laptop GPU", 8, 0.14, 590.0),
)


def make_memory(activations: int = 1500, desktop: int = 350) -> MemoryForecast:
    """Return the forecast of a 7B model with NF4 weights; arguments in MiB."""
    return MemoryForecast(
        weights_bytes=3590 * MIB,
        constants_bytes=98 * MIB,
        adapter_bytes=152 * MIB,
        gradients_bytes=152 * MIB,
        optimizer_bytes=304 * MIB,
        activations_bytes=activations * MIB,
        inputs_bytes=320 * MIB,
        loss_bytes=210 * MIB,
        workspace_bytes=330 * MIB,
        communication_bytes=64 * MIB,
        slack_bytes=120 * MIB,
        context_bytes=520 * MIB,
        desktop_bytes=desktop * MIB,
    )


def make_gpu_plan(place: int, **changes: Any) -> GpuPlan:
    """Return the part of the GPU at `place` of CARDS."""
    node, device, card, gib, share, rate = CARDS[place]
    plan = GpuPlan(
        node=node,
        device=device,
        card=card,
        share=share,
        setting=MemorySetting(micro_tokens=4096, num_recomputed=20 if gib == 8 else 0),
        memory=make_memory(600 if gib == 8 else 5200),
        room_bytes=gib * GIB,
        tokens_per_s=rate,
    )
    return replace(plan, **changes)


def make_plan_of_all(fits: bool = True) -> Plan:
    """Return data parallel over four GPUs, with one GPU and a sharded plan as runners-up."""
    chosen = Candidate(
        mode="data",
        nodes=("alpha", "beta", "gamma"),
        gpus=tuple(make_gpu_plan(place) for place in range(len(CARDS))),
        fits=True,
        parts_s=StepParts(compute_s=11.7, network_s=0.9, optimizer_s=0.1),
        tokens_per_step=49_152.0,
        total_s=14_300.0,
        energy_wh=2710.0,
        num_steps=1125,
        reason="data parallel on alpha, beta and gamma: the fastest that fits",
    )
    alone = replace(
        chosen,
        mode="single",
        nodes=("alpha",),
        gpus=(make_gpu_plan(0, share=1.0),),
        parts_s=StepParts(compute_s=32.6, optimizer_s=0.1),
        total_s=36_800.0,
        energy_wh=2900.0,
        reason="alpha alone: 2.6 times as long per step",
    )
    sharded = replace(
        chosen,
        mode="sharded",
        parts_s=StepParts(compute_s=12.0, network_s=515.0),
        reason="sharded on alpha, beta and gamma: 515 s of network per step over 1 Gb/s, and not "
        "trained by this version yet",
    )
    plan = Plan(
        chosen=chosen,
        others=(alone, sharded),
        advice=(Advice(text="Measure gamma's laptop GPU: its speed is guessed from its name."),),
        assumptions=("alpha and gamma: 1 Gb/s, as their network cards say",),
    )
    if fits:
        return plan
    tight = replace(
        chosen,
        fits=False,
        gpus=tuple(replace(gpu, room_bytes=6 * GIB) for gpu in chosen.gpus),
        reason="data parallel on alpha, beta and gamma: needs 8.1 GiB of the 6.0 GiB of gamma",
    )
    advice = Advice(
        text="With sequences of 1,024 tokens it fits gamma.", change={"sequence_tokens": 1024}
    )
    return replace(plan, chosen=None, others=(tight, alone), advice=(advice,))


def make_comparison() -> ForecastComparison:
    """Return the forecast of four ranks and their measurements."""
    plan = make_plan_of_all().chosen
    assert plan is not None
    ranks = tuple(
        RankForecast(
            node=gpu.node,
            device=gpu.device,
            card=gpu.card,
            share=gpu.share,
            tokens_per_s=gpu.tokens_per_s,
            setting=gpu.setting,
            allocated_bytes=gpu.memory.allocated_bytes,
            low_bytes=gpu.memory.low_bytes,
            expected_bytes=gpu.memory.expected_bytes,
            high_bytes=gpu.memory.high_bytes,
            memory_parts=tuple(gpu.memory.parts.items()),
        )
        for gpu in plan.gpus
    )
    forecast = Forecast(
        mode="data",
        family="llama",
        adapter="qlora",
        longest_tokens=2048,
        ranks=ranks,
        step_s=plan.step_s,
        network_s=plan.parts_s.network_s,
        tokens_per_s=plan.tokens_per_s,
        total_s=plan.total_s,
    )
    measured = Measured(
        num_steps=412,
        ranks=tuple(
            RankMeasured(
                tokens_per_s=(rank.tokens_per_s or 0.0) * 0.97,
                setting=rank.setting,
                memory_bytes=round((rank.allocated_bytes or 0) * 0.985),
            )
            for rank in ranks
        ),
        step_s=13.1,
        network_s=1.0,
        tokens_per_s=3750.0,
    )
    return ForecastComparison(forecast=forecast, measured=measured)

"""A believable plan for the fake cluster: three candidates, of which one cannot be trained yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.contract.model_cut import WeightTier
from app.planning.accuracy.forecast_accuracy import (
    Forecast,
    ForecastComparison,
    Measured,
    RankForecast,
    RankMeasured,
)
from app.planning.candidate import Advice, Candidate, GpuPlan, Plan, RunLimit, StepParts
from app.planning.memory.forecast import MemoryForecast, MemorySetting
from app.planning.shape.model_parts import ModelPart, ModelSummary
from app.planning.upgrades import OfferKind, Upgrade, Upgrades

GIB = 1024**3
MIB = 1024**2
LLAMA = ModelSummary(family="llama", num_parameters=6_738_415_616)
WIDE = ModelPart(
    kind="untouched", names=("embeddings", "head", "norms"), num_layers=0, num_weights=262_410_240
)
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
        parts=(WIDE,),
        model=LLAMA,
    )
    if fits:
        return plan
    tight = replace(
        chosen,
        fits=False,
        gpus=tuple(replace(gpu, room_bytes=6 * GIB) for gpu in chosen.gpus),
        reason="data parallel on alpha, beta and gamma: needs 8.1 GiB of the 6.0 GiB of gamma",
    )
    on = "it then fits on alpha, beta and gamma, with"
    advice = (
        Advice(
            text=f"Hold the weights in 4 bits (QLoRA): {on} 5.7 of 6.0 GiB",
            change={"adapter.kind": "qlora"},
        ),
        Advice(
            text=f"Shorten sequences to 1,024 tokens: {on} 5.9 of 6.0 GiB",
            change={"sequence_tokens": 1024},
        ),
    )
    streamed = replace(
        alone,
        mode="streamed",
        parts_s=StepParts(compute_s=32.6, input_s=28.4, optimizer_s=0.1),
        reason="streamed on alpha: fits, but not trained by this version yet",
    )
    return replace(plan, chosen=None, others=(tight, alone, streamed), advice=advice)


def make_plan_of_mixture() -> Plan:
    """Return QLoRA of Qwen3-30B-A3B on one card, whose PC has no C compiler."""
    shape = ModelSummary(
        family="qwen3_moe", num_parameters=30_532_122_624, num_experts=128, num_experts_met=8
    )
    memory = replace(make_memory(4100), weights_bytes=15_200 * MIB)
    gpu = make_gpu_plan(1, share=1.0, memory=memory)
    chosen = Candidate(
        mode="single",
        nodes=("beta",),
        gpus=(gpu,),
        fits=True,
        parts_s=StepParts(compute_s=21.3, optimizer_s=0.1),
        tokens_per_step=49_152.0,
        total_s=24_100.0,
        energy_wh=1930.0,
        num_steps=1125,
        reason="one GPU of beta: the fastest that fits",
    )
    experts = ModelPart(
        kind="no_adapter",
        names=("experts",),
        num_layers=48,
        num_weights=28_991_029_248,
        num_experts=128,
        is_choice=True,
    )
    wide = ModelPart(
        kind="untouched",
        names=("embeddings", "head", "routers", "norms"),
        num_layers=0,
        num_weights=635_000_000,
    )
    routers = ModelPart(
        kind="no_balance_loss", names=("routers",), num_layers=48, num_weights=12_582_912
    )
    limit = RunLimit(
        reason="no_compiler", nodes=("beta",), card="NVIDIA GeForce RTX 3090", time_ratio=1.44
    )
    return Plan(
        chosen=chosen,
        others=(),
        advice=(),
        assumptions=("tokens of chats.jsonl estimated from its rows, at 4 characters each",),
        parts=(experts, wide, routers),
        limits=(limit,),
        model=shape,
    )


def make_plan_of_stages() -> Plan:
    """Return a 70B model as a pipeline over four GPUs, with streamed weights as runner-up."""
    spans = ((0, 28), (28, 50), (50, 71), (71, 80))
    base = make_plan_of_all().chosen
    assert base is not None
    stages = tuple(
        make_gpu_plan(
            place,
            layers=(first, stop),
            share=(stop - first) / 80,
            memory=replace(make_memory(300), weights_bytes=(stop - first) * 420 * MIB),
            max_in_flight=(6, 4, 3, 1)[place],
            setting=MemorySetting(micro_tokens=2048, num_recomputed=stop - first),
        )
        for place, (first, stop) in enumerate(spans)
    )
    chosen = replace(
        base,
        mode="pipeline",
        gpus=stages,
        parts_s=StepParts(compute_s=310.0, bubble_s=22.0, network_s=6.0, optimizer_s=0.3),
        wire_s=71.0,
        total_s=380_000.0,
        energy_wh=31_000.0,
        reason="pipeline on alpha, beta and gamma: the fastest that fits",
    )
    tiers: tuple[WeightTier, ...] = ("ram", "ram", "ram", "disk")
    streamed = replace(
        chosen,
        mode="streamed",
        gpus=tuple(
            replace(
                gpu,
                layers=(0, 80),
                max_in_flight=None,
                num_streamed=80 - (stop - first),
                streams_from=tier,
            )
            for gpu, (first, stop), tier in zip(stages, spans, tiers, strict=True)
        ),
        parts_s=StepParts(compute_s=400.0, optimizer_s=0.3),
        wire_s=None,
        reason="streamed weights on alpha, beta and gamma: 1.2 times as long per step",
    )
    return replace(make_plan_of_all(), chosen=chosen, others=(streamed,), advice=(), assumptions=())


def make_comparison(plan_of: Plan | None = None) -> ForecastComparison:
    """Return the forecast of four ranks of a plan, by default data parallel, and measurements."""
    plan = (plan_of or make_plan_of_all()).chosen
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
            room_bytes=gpu.room_bytes,
            layers=gpu.layers,
            max_in_flight=gpu.max_in_flight,
            num_streamed=gpu.num_streamed,
            streams_from=gpu.streams_from,
        )
        for gpu in plan.gpus
    )
    forecast = Forecast(
        mode=plan.mode,
        family="llama",
        adapter="qlora",
        longest_tokens=2048,
        ranks=ranks,
        step_s=plan.step_s,
        network_s=plan.parts_s.network_s,
        bubble_s=plan.parts_s.bubble_s,
        wire_s=plan.wire_s,
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


def make_upgrades() -> Upgrades:
    """Return three purchases for the run of `make_plan_of_all`, and one that gains nothing."""
    base = make_plan_of_all().chosen
    rows: tuple[tuple[OfferKind, str, str, float, float, str], ...] = (
        (
            *("nic", "2.5", "2.5 Gb/s: 3 network cards and a switch", 145.0, 410.0),
            "needs a free slot or USB port in each PC, and cables for this speed",
        ),
        (
            *("gpu", "RTX 3090", "RTX 3090 in a free slot of alpha", 650.0, 1060.0),
            "needs 3 slots and 350 W more",
        ),
        (
            *("pc", "32", "another PC with RTX 5070 Ti and 32 GiB of RAM", 1300.0, 1420.0),
            "its network is planned with 0.94 Gb/s",
        ),
        ("ram", "32", "32 GiB more RAM in gamma", 120.0, 0.0, "needs free memory slots"),
    )
    assert base is not None
    return Upgrades(
        base=base,
        found=tuple(
            Upgrade(
                kind=kind,
                name=name,
                text=text,
                price=price,
                caveats=(caveat,),
                tokens_per_s=base.tokens_per_s + gain,
                gain_tokens_per_s=gain,
                gain_per_100=100 * gain / price,
                candidate=base,
            )
            for kind, name, text, price, gain, caveat in rows
        ),
        currency="EUR",
        notes=(
            "prices are guesses of 2026-11-28: your own list makes them exact",
            "cards to buy are planned by their data sheets; slots and power supplies are not known",
            "alpha and gamma: 1 Gb/s, as their network cards say",
        ),
    )

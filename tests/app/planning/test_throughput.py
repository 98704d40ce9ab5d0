"""Forecasts of speed against whole steps that were measured, and what must hold of any of them."""

from __future__ import annotations

from typing import Any

import pytest

from agents.contract.node import Calibration
from agents.contract.spec import AdapterKind, AdapterSpec, DataSpec, RunSpec
from app.planning.cluster import PlannedGpu
from app.planning.memory.forecast import MemorySetting
from app.planning.model_shape import ModelShape, read_shape
from app.planning.rates import find_rates
from app.planning.throughput import make_pace, measure_work

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
# Tokens per second of the trainer on an H200: Llama-2-7B, r=16 on q, k, v and o, sequences of
# 2,048, exact attention, torch 2.11 with CUDA 13. The shares in throughput.py follow these rows.
MEASURED: list[tuple[AdapterKind, int, int, int, float]] = [
    ("qlora", 8192, 32, 0, 12559),
    ("qlora", 8192, 30, 0, 13554),
    ("qlora", 8192, 18, 14, 14109),
    ("qlora", 4096, 5, 13, 15500),
    ("qlora", 2048, 0, 0, 14504),
    ("qlora", 4096, 0, 8, 16370),
    ("qlora", 8192, 0, 12, 17441),
    ("lora", 8192, 0, 0, 18725),
]


def llama_7b() -> ModelShape:
    return read_shape(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        }
    )


def speed(kind: AdapterKind, setting: MemorySetting, gpu: PlannedGpu) -> float:
    adapter = AdapterSpec(kind=kind, targets=QKVO)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter)
    pace = make_pace(measure_work(llama_7b(), spec, 2048), find_rates(gpu))
    return pace.tokens_per_s(setting, 2048)


def test_speeds_are_as_measured_on_an_h200() -> None:
    errors = [
        speed(
            kind,
            MemorySetting(micro_tokens=tokens, num_recomputed=recomputed, num_moved=moved),
            PlannedGpu(name="NVIDIA H200"),
        )
        / measured
        - 1
        for kind, tokens, recomputed, moved, measured in MEASURED
    ]

    assert sum(abs(error) for error in errors) / len(errors) < 0.025
    assert max(abs(error) for error in errors) < 0.08


def test_a_measurement_on_the_node_counts_more_than_the_data_sheet() -> None:
    slow = Calibration(
        card="NVIDIA GeForce RTX 4070", matrix_flops_per_s=25e12, memory_bytes_per_s=215e9
    )
    setting = MemorySetting(micro_tokens=4096)
    listed = speed("qlora", setting, PlannedGpu(name="NVIDIA GeForce RTX 4070"))
    measured = speed("qlora", setting, PlannedGpu(name="NVIDIA GeForce RTX 4070", calibration=slow))

    assert measured == pytest.approx(listed / 2, rel=0.05)


def test_asking_the_reference_costs_a_forward_pass() -> None:
    def seconds(**changes: Any) -> float:
        spec = RunSpec(model="m", data=DataSpec(train="d"), **changes)
        pace = make_pace(measure_work(llama_7b(), spec, 1024), find_rates(PlannedGpu(name="4090")))
        return pace.seconds(2048, MemorySetting(micro_tokens=2048), 2048)

    adapter = AdapterSpec(kind="qlora")
    ratio = seconds(adapter=adapter, objective="dpo") / seconds(adapter=adapter)
    assert 1.3 < ratio < 1.6
    full = AdapterSpec(kind="full")  # it was asked before the first step
    assert 1 < seconds(adapter=full, objective="dpo") / seconds(adapter=full) < 1.1


def test_an_unknown_card_has_some_speed() -> None:
    rates = find_rates(PlannedGpu(name="Mystery 9000"))

    assert rates.source == "assumed"
    assert speed("lora", MemorySetting(micro_tokens=2048), PlannedGpu(name="Mystery 9000")) > 0


def test_the_claim_of_150_tokens_per_s_of_a_5070_ti_is_far_too_low() -> None:
    for recomputed in (0, 32):
        setting = MemorySetting(micro_tokens=2048, num_recomputed=recomputed)
        assert speed("qlora", setting, PlannedGpu(name="RTX 5070 Ti")) > 6 * 150

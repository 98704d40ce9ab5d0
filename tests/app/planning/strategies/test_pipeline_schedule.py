"""The pipeline's formulas against a 70B model trained on seven GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.build_context import open_case
from app.planning.hardware.cluster import Cluster, ethernet
from app.planning.strategies.pipeline_memory import stage_memory
from app.planning.strategies.pipeline_plan import plan_pipeline
from app.planning.strategies.pipeline_schedule import time_pipeline
from tests.app.planning.clusters import GIB, ask, llama, make_node

# Measured: seven H200s in seven network namespaces, 80 layers in NF4, LoRA r=16 on q, k, v and o,
# 16 micro-batches of 1 x 1,024 tokens, every layer recomputed, each slowed to 37 TFLOP/s, torch's
# Schedule1F1B over sockets.
LAYERS = (12, 12, 12, 11, 11, 11, 11)
UNSHAPED_S, GIGABIT_S = 37.7, 43.2
FIRST_GIB, LATE_GIB = 8.1, 6.4
LAYER_FLOPS = 6 * 1024 * llama("70B").layers[0].num_parameters
STAGES_S = [count * LAYER_FLOPS / 37e12 for count in LAYERS]


def test_time_without_a_slow_network() -> None:
    assert time_pipeline(STAGES_S, [0.0] * 6, 16).total_s == pytest.approx(UNSHAPED_S, rel=0.05)


def test_time_over_gigabit() -> None:
    transfer_s = 1024 * 8192 * 2 / ethernet(1.0).bytes_per_s
    time = time_pipeline(STAGES_S, [transfer_s] * 6, 16)

    assert time.total_s == pytest.approx(GIGABIT_S, rel=0.05)
    assert time.network_s > 2 * 6 * transfer_s  # a round trip is waited for again and again


def test_memory_of_the_stages() -> None:
    cluster = Cluster(nodes=tuple(make_node(f"pc{i}", "H200") for i in range(7)))
    case = open_case(ask(cluster, "70B", sequence_tokens=1024, batch_sequences=16))
    peaks = [
        stage_memory(case, case.workers[place], count, place, 7).allocated_bytes / GIB
        for place, count in enumerate(LAYERS)
    ]

    assert peaks[0] == pytest.approx(FIRST_GIB, rel=0.1)
    assert peaks[-1] == pytest.approx(LATE_GIB, rel=0.1)
    assert sorted(peaks[:-1], reverse=True) == peaks[:-1]


def test_stages_follow_speed_and_memory() -> None:
    cards = ("RTX 4070", "RTX 4070", "RTX 5070 Ti", "RTX 3070 Ti")
    nodes = tuple(make_node(f"pc{i}", card) for i, card in enumerate(cards))
    cluster = Cluster(nodes=nodes, default_link=ethernet(10))
    plan = plan_pipeline(case := open_case(ask(cluster, "13B")), case.workers)

    assert plan is not None
    assert plan.fits
    layers = [gpu.layers for gpu in plan.gpus]
    assert min(one for one in layers if one is not None)[0] == 0
    counts = [b - a for a, b in (one or (0, 0) for one in layers)]
    assert counts[2] == max(counts)
    assert counts[3] == min(counts)


def test_a_chain_longer_than_the_model_is_no_plan() -> None:
    shape = llama("7B")
    short = replace(shape, layers=shape.layers[:2])
    cluster = Cluster(nodes=tuple(make_node(f"pc{i}", "RTX 4070") for i in range(3)))
    case = open_case(replace(ask(cluster), shape=short))

    assert plan_pipeline(case, case.workers) is None

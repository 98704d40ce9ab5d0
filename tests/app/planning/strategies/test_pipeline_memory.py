"""Stages that keep the inputs of their layers in the RAM of their PC."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.layer_plan import STAGE_CHUNK_BYTES
from agents.contract.run import RankPlacement
from app.planning.build_context import open_case
from app.planning.candidate import Candidate
from app.planning.cut import make_cut
from app.planning.plan import make_plan
from app.planning.shape.model_shape import read_shape
from app.planning.strategies.pipeline_memory import can_offload
from app.planning.strategies.pipeline_plan import plan_pipeline
from app.presentation.plan_text import describe_setting
from app.presentation.stage_text import list_planned_stages
from tests.app.planning.clusters import GIB, ask, make_pcs


def plan(ram_gib: int) -> Candidate:
    """Return the pipeline of a 70B over five cards that its weights fill."""
    pcs = make_pcs(*["RTX 4070"] * 5)
    nodes = tuple(replace(node, ram_bytes=ram_gib * GIB) for node in pcs.nodes)
    request = ask(replace(pcs, nodes=nodes), "70B", batch_sequences=64, parallel="pipeline")
    case = open_case(request)
    found = plan_pipeline(case, case.workers)
    assert found is not None
    return found


def test_a_stage_offloads_where_it_does_not_fit_without() -> None:
    found = plan(ram_gib=64)
    first = found.gpus[0]

    assert found.fits
    # The first ones have the most micro-batches in flight; the others hold as many layers.
    assert [gpu.offloads for gpu in found.gpus] == [True, True, False, False, False]
    assert first.max_in_flight == max(gpu.max_in_flight or 0 for gpu in found.gpus)
    # Four inputs of 2,048 tokens are a chunk.
    assert first.layers == (0, 16)
    assert first.host_bytes == (first.max_in_flight or 0) * 4 * STAGE_CHUNK_BYTES
    assert describe_setting(first).endswith("16 layers recomputed with their inputs in RAM")
    rows = list_planned_stages(found)
    assert rows[0].layers_text.endswith(", their inputs in RAM")
    assert "RAM" not in rows[2].layers_text
    ranks = [
        RankPlacement(rank=rank, local_rank=0, node=gpu.node, device=gpu.device)
        for rank, gpu in enumerate(found.gpus)
    ]
    cut = make_cut(found, ranks, 80)
    assert cut is not None
    assert [stage.offloads for stage in cut.stages] == [True, True, False, False, False]


def test_without_ram_for_inputs_a_slower_cut_is_planned() -> None:
    found = plan(ram_gib=8)

    assert found.fits
    assert not any(gpu.offloads for gpu in found.gpus)
    assert found.step_s > plan(ram_gib=64).step_s


def test_all_layers_are_counted_that_fit_beside_the_inputs_on_their_way() -> None:
    """The first layers bring an input each, and later ones no more."""
    cards = make_pcs("RTX 3070 Ti", "RTX 3070 Ti")
    case = open_case(ask(cards, "13B", sequence_tokens=8192, parallel="pipeline"))
    found = plan_pipeline(case, case.workers)

    assert found is not None
    assert found.fits
    assert all(gpu.offloads for gpu in found.gpus)


def test_inputs_leave_a_gpu_no_slower_than_a_layer_passes() -> None:
    case = open_case(ask(make_pcs("RTX 4070"), "70B"))
    (worker,) = case.workers
    # 32 MiB for each layer.
    assert can_offload(case, worker, layer_s=0.1)
    slow = replace(worker, rates=replace(worker.rates, to_host_bytes_per_s=1e9))
    assert not can_offload(case, slow, layer_s=0.1)
    long = open_case(ask(make_pcs("RTX 4070"), "70B", sequence_tokens=16384))
    assert not can_offload(long, long.workers[0], layer_s=10.0)


@pytest.mark.parametrize("dense", [[], [0, 1, 2], [45, 46, 47]])
def test_stages_of_unlike_layers_are_cut_by_what_their_own_layers_take(dense: list[int]) -> None:
    config = {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "head_dim": 128, "mlp_only_layers": dense,
    }  # fmt: skip
    cards = ("RTX 3060", "RTX 3070 Ti", "RTX 3070 Ti")
    request = ask(make_pcs(*cards), parallel="pipeline", batch_sequences=64)
    shape = read_shape(config)

    found = make_plan(replace(request, shape=shape)).chosen

    assert found is not None, "a cut fits, in which the larger card has more of them"
    held = [
        sum(layer.num_parameters for layer in shape.layers[slice(*gpu.layers)]) / 2  # 4 bits
        for gpu in found.gpus
        if gpu.layers is not None
    ]
    assert all(
        gpu.memory.weights_bytes > num_bytes
        for gpu, num_bytes in zip(found.gpus, held, strict=True)
    )

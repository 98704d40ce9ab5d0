"""Plans of mixtures of experts count what the trainer makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.trainer.metrics.flops import read_flops
from agents.trainer.model.model import build_trained_model, load_model
from app.planning.advice.changes import apply_change
from app.planning.memory.experts import ExpertsMemory, count_experts, count_met_adapter
from app.planning.memory.forecast import (
    GIB,
    GpuMemory,
    MemorySetting,
    count_trained,
    estimate_memory,
)
from app.planning.shape.model_parts import list_parts
from app.planning.shape.model_shape import read_shape
from app.planning.throughput import measure_work
from app.presentation.model_text import describe_parts, offer_adapters
from tests.agents.trainer.model.mixtures import save_mixture

QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip
GLM = {**QWEN, "model_type": "glm4_moe", "n_routed_experts": 128, "num_experts": None,
       "n_shared_experts": 1, "first_k_dense_replace": 3}  # fmt: skip
RUN = RunSpec(model="m", data=DataSpec(train="d"), adapter=AdapterSpec(kind="qlora", dropout=0.0))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "glm4_moe"])
@pytest.mark.parametrize("on_experts", [True, False])
def test_adapters_and_products_are_those_of_the_trainer(kind, on_experts, tmp_path):
    folder = save_mixture(tmp_path, kind)
    adapter = AdapterSpec(rank=4, dropout=0.0, experts=on_experts)
    spec = replace(RUN, adapter=adapter, sequence_tokens=64)
    device = torch.device("cpu")
    base = load_model(spec, folder, device)
    shape = read_shape(base.config.to_dict())
    assert shape.num_parameters == pytest.approx(sum(p.numel() for p in base.parameters()), abs=32)
    model = build_trained_model(spec, base, None, plain_template=False, device=device)
    assert count_trained(shape, spec) == sum(p.numel() for _, p in model.named_parameters())
    flops = read_flops(model.module)
    assert count_met_adapter(shape, spec) == flops.trained
    # Routers are no layers of theirs in the trainer's count.
    routers = sum(layer.num_router for layer in shape.layers)
    work = measure_work(shape, spec, 64)
    assert work.layer_flops == 4 * (flops.frozen + routers) + 6 * flops.trained


def test_qlora_of_30_billion_weights_fits_24_gib():
    shape = read_shape(QWEN)
    assert shape.num_parameters == 30_532_122_624
    memory = estimate_memory(
        shape,
        RUN,
        setting=MemorySetting(micro_tokens=2048, num_recomputed=48),
        longest_tokens=2048,
        gpu=GpuMemory(total_bytes=24 * GIB, num_multiprocessors=128),
    )
    # Experts in 4.127 bits, embeddings and head in 16.
    packed = (0.5 + 1 / 64 + 4 / (64 * 256)) * shape.num_nf4
    wide = 2 * (shape.num_parameters - shape.num_nf4)
    assert memory.weights_bytes + memory.constants_bytes == pytest.approx(packed + wide, rel=1e-6)
    assert memory.expected_bytes < 24 * GIB
    bf16 = replace(RUN, adapter=AdapterSpec(kind="lora", dropout=0.0))
    assert read_shape(QWEN).num_parameters * 2 > 48 * GIB
    assert count_trained(shape, bf16) == count_trained(shape, RUN)


def test_a_layer_holds_its_rows_and_the_dequantized_experts():
    def count(spec, **changes):
        shape = read_shape({**QWEN, **changes})
        return count_experts(shape, shape.layers[0], spec, width=2, tokens=2048)

    found = count(RUN)
    rows = 2 * 2048 * 8 * 2048
    assert found.pass_bytes == rows + 128 * 2 * 768 * 2048 * 2
    assert found.kept_bytes == 0
    bf16 = replace(RUN, adapter=AdapterSpec(dropout=0.0))
    assert count(bf16).pass_bytes == rows
    adapted = replace(RUN, adapter=AdapterSpec(kind="qlora", dropout=0.0, experts=True))
    assert count(adapted).kept_bytes == 2 * 2048 * (2048 + 8 * 768)
    assert count(RUN, model_type="qwen3") == ExpertsMemory()


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (
            QWEN,
            {},
            [
                "Experts (128 in each of 48 layers) get no adapter: 29.0 billion weights",
                "Embeddings, head, routers and norms get no adapter and stay in 16 bits: 1.2 GiB",
                "Routers of 48 layers are frozen, and no auxiliary loss balances the load of the "
                "experts",
            ],
        ),
        (
            QWEN,
            {"kind": "lora", "experts": True, "targets": ("q_proj", "v_proj")},
            [
                "k_proj and o_proj of 48 layers get no adapter: 453 million weights",
                "Embeddings, head, routers and norms get no adapter: 635 million weights",
                "Routers of 48 layers are frozen, and no auxiliary loss balances the load of the "
                "experts",
            ],
        ),
        (GLM, {"kind": "full"}, []),
        (
            {**QWEN, "model_type": "qwen3"},
            {"kind": "lora"},
            ["Embeddings, head and norms get no adapter: 623 million weights"],
        ),
        (
            {**QWEN, "model_type": "qwen3"},
            {"targets": ("gate_proj", "lm_head")},
            [
                "q_proj, k_proj, v_proj, o_proj, up_proj and down_proj of 48 layers get no "
                "adapter: 2.1 billion weights",
                "Embeddings and norms get no adapter and stay in 16 bits: 594 MiB",
                "Head stays in 16 bits: 594 MiB",
            ],
        ),
        (
            {**QWEN, "model_type": "jetmoe", "num_hidden_layers": 2, "intermediate_size": 768},
            {"experts": True},
            ["Experts (128 in each of 2 layers) get no adapter and stay in 16 bits: 2.2 GiB"],
        ),
    ],
)
def test_what_is_left_as_it_is_has_a_name(config, changes, expected):
    adapter = AdapterSpec(**{"kind": "qlora", "dropout": 0.0, **changes})
    parts = list_parts(read_shape(config), replace(RUN, adapter=adapter))
    found = describe_parts(parts)
    assert found[: len(expected)] == expected
    assert bool(found) == bool(expected)
    # What is offered makes the experts' line go away, and is a valid run.
    for offer in offer_adapters(parts):
        changed = apply_change(replace(RUN, adapter=adapter), offer.change)
        assert not any(part.is_choice for part in list_parts(read_shape(config), changed))

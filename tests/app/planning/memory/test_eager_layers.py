"""What a layer that is not compiled is said to keep is what PyTorch keeps alive."""

from dataclasses import replace

import pytest

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.planning.memory.eager_layers import count_kept, count_kept_full
from app.planning.memory.forecast import GIB, estimate_memory
from app.planning.memory.gpu import GpuMemory, MemorySetting
from app.planning.memory.layers import read_sizes
from app.planning.shape.model_shape import read_shape
from tests.app.planning import eager_layer

SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GEMMA_2 = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip


def make_spec(kind="lora", targets="all-linear", dropout=0.0, **changes):
    adapter = AdapterSpec(kind=kind, targets=targets, dropout=dropout, rank=8)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter, precision="bf16")
    return replace(spec, **changes)


@pytest.mark.parametrize(
    ("family", "kind", "targets", "dropout"),
    [
        ("llama", "lora", ATTENTION, 0.0),
        ("llama", "lora", "all-linear", 0.05),
        ("qwen3", "lora", "all-linear", 0.0),
        ("phi3", "lora", "all-linear", 0.05),
        ("llama", "full", "all-linear", 0.0),
    ],
)
def test_kept_bytes_are_those_that_autograd_saves(family, kind, targets, dropout):
    check_kept(family, make_spec(kind, targets, dropout), rel=0.03)


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_dora_keeps_what_its_magnitudes_multiply(dropout):
    spec = make_spec("lora", "all-linear", dropout)
    check_kept("llama", replace(spec, adapter=replace(spec.adapter, dora=True)), rel=0.06)


def check_kept(family, spec, rel):
    kind = spec.adapter.kind
    shape = read_shape({"model_type": family, "vocab_size": 64, "num_hidden_layers": 1, **SIZES})
    sizes = read_sizes(shape, shape.layers[0], spec)
    found = eager_layer.count_kept(family, spec, SIZES)
    if kind == "full":
        # The narrow weights, which autocast keeps for the backward pass, are counted apart.
        expected = count_kept_full(sizes, 2) + 2 * sizes.num_weights / eager_layer.TOKENS
    else:
        expected = count_kept(sizes, 2)
    assert found == pytest.approx(expected, rel=rel)


def test_capped_scores_are_kept_where_no_kernel_can_be_made():
    shape, setting = read_shape(GEMMA_2), MemorySetting(micro_tokens=4096)
    activations = [
        estimate_memory(
            shape,
            make_spec(compile="off"),
            setting=setting,
            longest_tokens=2048,
            gpu=GpuMemory(total_bytes=24 * GIB, capability=(8, 6), has_compiler=has_compiler),
        ).activations_bytes
        for has_compiler in (True, False)
    ]
    assert activations[1] - activations[0] == 26 * 4096 * 2048 * 8 * 8

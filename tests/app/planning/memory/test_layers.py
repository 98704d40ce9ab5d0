"""What a layer is said to keep is what the compiler keeps."""

import pytest

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.planning.memory import layers
from app.planning.memory.layers import count_kept, count_kept_full, read_sizes
from app.planning.shape.model_shape import read_shape
from tests.app.planning.compiled_layer import count_saved
from tests.app.planning.compiled_peak import count_peak

SIZES = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES = [
    ("llama", "lora", ATTENTION, 0.0),
    ("phi3", "lora", "all-linear", 0.05),
    ("qwen3", "lora", "all-linear", 0.0),
    ("llama", "dora", "all-linear", 0.0),
    ("llama", "dora", "all-linear", 0.05),
    ("llama", "full", "all-linear", 0.0),
]


@pytest.mark.parametrize(("family", "kind", "targets", "dropout"), CASES)
def test_kept_bytes_are_those_that_the_compiler_saves(family, kind, targets, dropout):
    dora = kind == "dora"
    kind = "lora" if dora else kind
    adapter = AdapterSpec(kind=kind, targets=targets, dropout=dropout, rank=8, dora=dora)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter, precision="bf16")
    sizes = {**SIZES, "head_dim": 32}
    shape = read_shape({"model_type": family, "vocab_size": 64, "num_hidden_layers": 1, **sizes})
    found = count_saved(family, spec, sizes)
    rules = read_sizes(shape, shape.layers[0], spec)
    expected = count_kept_full(rules, 2, 4) if kind == "full" else count_kept(rules, 2)
    if rules.has_fused_heads:
        # Of the product that the values are a part of, the compiler names that part alone.
        expected -= 2 * (rules.queries + rules.keys)
    # DoRA also saves a few numbers per token.
    assert found == pytest.approx(expected, rel=0.01 if dora else 1e-9)


@pytest.mark.parametrize(
    ("family", "dropout", "dora"),
    [
        pytest.param("llama", 0.05, False, marks=pytest.mark.campaign),
        ("phi3", 0.0, False),
        pytest.param("llama", 0.0, True, marks=pytest.mark.campaign),
        ("llama", 0.05, True),
    ],
)
def test_a_recomputed_layer_takes_what_the_compilers_code_allocates(family, dropout, dora):
    adapter = AdapterSpec(kind="lora", dropout=dropout, rank=8, dora=dora)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter, precision="bf16")
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 1376, "head_dim": 32}
    shape = read_shape({"model_type": family, "vocab_size": 64, "num_hidden_layers": 1, **sizes})
    rules = read_sizes(shape, shape.layers[0], spec)
    expected = 2 * layers._count_again(rules) + layers._small(rules)
    if not dropout:
        expected += 2 * rules.ffn  # a GPU takes one buffer less
    assert count_peak(family, spec, sizes) == pytest.approx(expected, rel=0.03)

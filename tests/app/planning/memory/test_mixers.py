"""Mixers with a state keep, and take while they are differentiated, what the planner counts."""

import pytest
import torch

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.trainer.kernels import linear_attention
from app.planning.memory.layers import count_kept, read_sizes
from app.planning.memory.mixers import count_mixer
from app.planning.shape.model_shape import LayerShape, Mixer, read_shape
from tests.app.planning.compiled_layer import count_saved
from tests.app.planning.live_bytes import LiveBytes

SIZES = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 24, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_d_conv": 4, "shared_intermediate_size": 352,
    "num_local_experts": 0, "num_experts_per_tok": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more", "dropout"),
    [
        ("qwen3_5_text", {**DELTA, "layer_types": ["linear_attention"]}, 0.05),
        ("qwen3_5_text", {**DELTA, "layer_types": ["full_attention"]}, 0.0),
        ("granitemoehybrid", {**MAMBA, "layer_types": ["mamba"]}, 0.0),
    ],
)
def test_kept_bytes_are_those_that_the_compiler_saves(family, more, dropout):
    adapter = AdapterSpec(kind="lora", dropout=dropout, rank=8)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter, precision="bf16")
    config = {**SIZES, **more, "model_type": family, "vocab_size": 64, "num_hidden_layers": 1}
    shape = read_shape(config)
    found = count_saved(family, spec, {**SIZES, **more})
    expected = count_kept(read_sizes(shape, shape.layers[0], spec), 2)
    # On a GPU (PyTorch 2.11) queries and keys are kept as they are repeated for each head; and of
    # the product that gate and decays are parts of, the compiler names those parts alone.
    mixer = shape.layers[0].mixer
    if shape.layers[0].kind == "delta":
        expected -= 2 * 2 * (mixer.num_heads - mixer.num_groups) * mixer.key_dim
    elif mixer is not None:
        keys, values = mixer.num_groups * mixer.key_dim, mixer.num_heads * mixer.value_dim
        expected -= 2 * (2 * keys + values)
    assert found == expected


@pytest.mark.parametrize("kind", ["delta", "mamba"])
@pytest.mark.parametrize("sizes", [(4, 12, 40, 56), (2, 8, 64, 32)])
def test_the_operators_backward_pass_takes_what_is_said(kind, sizes):
    groups, heads, key_dim, value_dim = sizes
    is_delta = kind == "delta"
    groups = groups if is_delta else 1
    mixer = Mixer(num_groups=groups, num_heads=heads, key_dim=key_dim, value_dim=value_dim)
    layer = LayerShape(linears=(), num_attention=0, num_mlp=0, num_norms=0, kind=kind, mixer=mixer)
    tokens = 512
    narrow = torch.bfloat16
    query, key = (torch.randn(tokens, groups, key_dim, dtype=narrow) for _ in range(2))
    value = torch.randn(tokens, heads, value_dim, dtype=narrow if is_delta else torch.float32)
    decay, strength = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    segment, gradient = torch.zeros(tokens, dtype=torch.int32), torch.randn_like(value)
    inputs = (query, key, value, decay, strength if is_delta else None)
    with LiveBytes() as live:
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        out = linear_attention._compute(tuple(leaves), segment, 1.0, normalizes=is_delta)
        wanted = [x for x in leaves if x is not None]
        torch.autograd.grad(out, wanted, gradient.to(out.dtype))
    assert live.peak / tokens == pytest.approx(count_mixer(layer, 2).scratch_bytes, rel=0.06)

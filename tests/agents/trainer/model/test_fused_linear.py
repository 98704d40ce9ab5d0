"""Fused layers compute what their classes do, adapters and gradients included."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.trainer.execution.layers import LayerStack
from agents.trainer.kernels import lora_kernels, nf4
from agents.trainer.model import fused_linear
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from tests.agents.trainer.execution.test_layers import make_part
from tests.agents.trainer.model.test_forward import SMALL
from tests.agents.trainer.ranks import DEMO, make_spec, make_tiny_model
from tests.draws import seed

CPU = torch.device("cpu")
SIZES = SMALL | {"vocab_size": 768, "intermediate_size": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), 2, attention_bias=True)


def make_forward(folder, adapter):
    spec = make_spec(precision="fp64", adapter=adapter)
    tokenizer, plain = load_tokenizer(folder)
    base = load_model(spec, folder, CPU)
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    draw = torch.Generator().manual_seed(seed(3))
    for _, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    for name, parameter in model.module.named_parameters():
        if name.endswith("base_layer.bias"):
            parameter.data = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    return model, Forward(model, CPU)


def find_sets(model):
    """Return the last names of the layers of each set."""
    sets = {}
    for name, module in model.named_modules():
        if hasattr(module, "fused_set"):
            last = name.removesuffix(".base_layer").rpartition(".")[2]
            sets.setdefault(id(module.fused_set), []).append(last)
    return list(sets.values())


def differentiate(model, forward, *, adapter_on=True):
    """Return the features and the gradients of all that is trained."""
    batch = build_micro_batch(make_part(20, 31).examples, CPU)
    model.clock.set([4, 5], batch.lengths, batch.num_tokens, CPU)
    fused_linear.collect_copies(model.module).refresh()
    if not adapter_on:
        with forward.without_adapter():
            found = forward.features(batch)
        model.clock.clear()
        return [found]
    found = forward.features(batch)
    weights = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(seed(9)), dtype=found.dtype
    )
    (found * weights).sum().backward()
    model.clock.clear()
    gradients = [parameter.grad.clone() for _, parameter in model.named_parameters()]
    for _, parameter in model.named_parameters():
        parameter.grad = None
    return [found.detach(), *gradients]


def check_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert (one - other).norm() <= 1e-10 * other.norm()


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj", "down_proj")], ids=str)
@pytest.mark.parametrize(
    ("rank", "dropout", "dora"),
    [(4, 0.0, False), (3, 0.2, False), (4, 0.2, True), (3, 0.2, True), (5, 0.0, True)],
)
def test_fused_layers_compute_the_same(tiny, targets, rank, dropout, dora):
    adapter = AdapterSpec(rank=rank, alpha=6, dropout=dropout, targets=targets, dora=dora)
    model, forward = make_forward(tiny, adapter)
    expected, bare = (differentiate(model, forward, adapter_on=on) for on in (True, False))
    forward.fuse_linear()
    whole = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert sorted(find_sets(model.module)) == sorted(2 * whole)
    check_same(differentiate(model, forward), expected)
    check_same(differentiate(model, forward, adapter_on=False), bare)
    for _, parameter in model.named_parameters():
        parameter.data *= 1.5  # as a step of the optimizer does
    changed = differentiate(model, forward)
    fused_linear.unfuse(model.module)
    check_same(differentiate(model, forward), changed)
    assert not torch.equal(changed[0], expected[0])


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3"])
def test_every_family_is_fused_where_its_layers_read_the_same(tmp_path, kind):
    torch.manual_seed(seed(1))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((DEMO / "model" / file).read_bytes())
    model, forward = make_forward(tmp_path, AdapterSpec(rank=4, dropout=0.0))
    expected = differentiate(model, forward)
    forward.fuse_linear()
    assert sorted(map(len, find_sets(model.module))) == (
        [1] * 8 if kind == "phi3" else [1] * 4 + [2] * 2 + [3] * 2
    )
    check_same(differentiate(model, forward), expected)


def test_magnitudes_begin_as_the_lengths_of_the_rows_also_in_half_precision(tiny):
    spec = make_spec(precision="bf16", adapter=AdapterSpec(rank=4, dropout=0.0, dora=True))
    tokenizer, plain = load_tokenizer(tiny)
    base = load_model(spec, tiny, CPU)
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    Forward(model, CPU).fuse_linear()
    layers = [m for m in model.module.modules() if hasattr(m, "fused_lengths")]
    assert len(layers) == 14
    for layer in layers:
        exact = layer.get_base_layer().weight.double().norm(dim=1)
        for found in (layer.lora_magnitude_vector["default"].weight, layer.fused_lengths):
            assert found.dtype == torch.float32
            assert ((found - exact).abs() <= 1e-6 * exact).all()


def test_layers_of_which_the_numbers_would_change_are_left(tiny, monkeypatch):
    model, forward = make_forward(tiny, AdapterSpec(rank=4, dropout=0.0))
    expected = differentiate(model, forward)
    compute = fused_linear.FusedSet.compute
    monkeypatch.setattr(fused_linear.FusedSet, "compute", lambda *given: 1.01 * compute(*given))
    forward.fuse_linear()
    assert "computed one by one by PEFT" in forward.limits[-1]
    monkeypatch.undo()
    assert not any(isinstance(m, fused_linear._FusedLinear) for m in model.module.modules())
    check_same(differentiate(model, forward), expected)


def test_a_card_that_does_not_take_the_kernels_does_without_them(monkeypatch, capsys):
    asked = []

    def refuse(*given):
        asked.append(given)
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(lora_kernels, "is_supported", lambda device: True)
    monkeypatch.setattr(lora_kernels, "expand", refuse)
    low, up = torch.zeros(5, 8, dtype=torch.float16), torch.zeros(24, 8, dtype=torch.float16)
    assert not lora_kernels.supports(low, [up])
    assert not lora_kernels.supports(low, [up])
    assert len(asked) == 1
    assert "PyTorch's products: out of resource" in capsys.readouterr().err
    lora_kernels._works.cache_clear()


class Packed(nn.Module):
    """Stands for 4-bit weights of 10 values of 2 bytes."""

    out_features, in_features, nf4_dtype = 5, 2, torch.bfloat16
    nf4_packed, nf4_has_sole_reader = torch.zeros(5, dtype=torch.uint8), False


def pretend_packed(model):
    """Let linear layers of the decoder look like 4-bit ones that are kept dequantized."""
    found = []
    for name, module in model.module.named_modules():
        if ".layers." in name and type(module) is nn.Linear and "lora_" not in name:
            module.nf4_packed = torch.zeros(1, dtype=torch.uint8)
            module.nf4_scale8 = torch.zeros(1, dtype=torch.uint8)
            module.nf4_dtype, module.nf4_has_sole_reader = module.weight.dtype, False
            module.nf4_dequantized = module.weight.data
            nf4._layers[module.nf4_scale8.data_ptr()] = module
            found.append(module)
    return found


@pytest.mark.parametrize("dora", [False, True])
def test_packed_weights_have_one_reader(tiny, dora):
    model, forward = make_forward(
        tiny, AdapterSpec(rank=4, targets=("q_proj", "o_proj"), dora=dora)
    )
    expected = differentiate(model, forward)
    layers = pretend_packed(model)
    assert len(layers) == 14
    forward.fuse_linear()
    check_same(differentiate(model, forward), expected)
    assert all(layer.nf4_has_sole_reader for layer in layers)
    fused_linear.unfuse(model.module)
    assert not any(layer.nf4_has_sole_reader for layer in layers)


def test_weights_are_kept_dequantized_where_they_are_needed_most_often(tiny, monkeypatch):
    model, _ = make_forward(tiny, AdapterSpec(rank=4))
    layers = LayerStack(model)
    assert not layers.can_dequantize
    for layer in layers._layers:
        layer.packed = nn.ModuleList([Packed(), Packed()])
    kept = []
    monkeypatch.setattr(nf4, "keep_dequantized", kept.append)
    monkeypatch.setattr(nf4, "repack", kept.remove)
    first, second = (list(layer.packed) for layer in layers._layers)
    assert layers.can_dequantize
    layers.dequantize(79)
    assert kept == [*first, second[0]]
    assert layers.dequantized_bytes == 60
    layers._modes = ["keep", "recompute"]
    layers.dequantize(45)
    assert kept == second
    layers.drop_dequantized()
    assert kept == []
    assert layers.dequantized_bytes == 0
    layers.set(LayerPlan())
    layers.dequantize(19)
    assert kept == []


def test_weights_stay_dequantized_as_far_as_memory_goes(tiny, monkeypatch):
    model, _ = make_forward(tiny, AdapterSpec(rank=4))
    layers = LayerStack(model)
    layers._layers[0].packed = nn.ModuleList([Packed(), Packed(), Packed()])
    kept = []

    def keep_dequantized(layer):
        if len(kept) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        kept.append(layer)

    def repack(layer):
        assert layers._repack_buffer is None, "the first one is packed in its place"
        kept.remove(layer)

    monkeypatch.setattr(nf4, "keep_dequantized", keep_dequantized)
    monkeypatch.setattr(nf4, "repack", repack)
    layers.dequantize(1000)
    assert (layers.dequantized_bytes, layers.dequantizable_bytes) == (40, 20)
    assert layers._repack_buffer.nbytes == 5
    layers.drop_dequantized()
    assert kept == []

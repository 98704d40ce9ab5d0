"""Our products of experts are those of each class, also in NF4, and the adapters are PEFT's."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.checkpoint.state import adapter_config
from agents.trainer.data.examples import Example
from agents.trainer.kernels.grouped_linear_op import sort_by_expert
from agents.trainer.metrics.flops import read_flops
from agents.trainer.model import experts, nf4_experts
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import build_trained_model, load_model
from tests.agents.trainer.model.mixtures import FAMILIES, make_mixture, pack_mxfp4, save_mixture
from tests.agents.trainer.model.test_forward import SEGMENTS, expected_loss, gradients, wrap
from tests.draws import seed

CPU = torch.device("cpu")
IDS = (torch.arange(23) * 7 % 90 + 3)[None]
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def loss_of(model):
    logits = model(input_ids=IDS, use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], IDS[0, 1:])


def make_run(path, **adapter) -> RunSpec:
    settings = {"rank": 4, "dropout": 0.0, **adapter}
    return RunSpec(
        model=str(path),
        data=DataSpec(train="x"),
        adapter=AdapterSpec(**settings),
        sequence_tokens=64,
        precision="fp64" if settings.get("kind") != "qlora" else "fp32",
    )


def train(spec, path):
    model = build_trained_model(
        spec, load_model(spec, path, CPU), None, plain_template=False, device=CPU
    )
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.named_parameters()):
            draw = torch.Generator().manual_seed(seed(number))
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_all_gradients_are_those_of_the_class(kind, monkeypatch):
    model = make_mixture(kind, torch.float64)
    expected = loss_of(model)
    expected_gradients = gradients(model, expected)
    assert experts.use_own_products(model)
    routes = []
    monkeypatch.setattr(
        experts, "sort_by_expert", lambda *args: routes.append(sort_by_expert(*args)) or routes[-1]
    )
    found = loss_of(model)
    assert len(routes) == len(list(experts.find_experts(model))) > 0
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    found_gradients = gradients(model, found)
    error = (found_gradients - expected_gradients).abs().max()
    assert error < 1e-12 * expected_gradients.abs().max()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_a_pack_has_the_gradient_of_its_rows(kind):
    model = make_mixture(kind, torch.float64)
    expected = expected_loss(model)
    expected_gradients = gradients(model, expected)
    experts.use_own_products(model)
    forward = Forward(wrap(model, torch.float64), CPU)
    batch = build_micro_batch([Example(tuple(SEGMENTS))], CPU)
    loss = forward.head.sum_loss(forward.features(batch), batch.label_N)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    found = gradients(model, loss)
    # The router of GLM-4 computes in float32, whatever the model's type.
    most = 2**-23 if kind == "glm4_moe" else 1e-8
    assert (found - expected_gradients).abs().max() < most * expected_gradients.abs().max()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral", "llama4_text"])
@pytest.mark.parametrize("on_experts", [True, False], ids=["experts", "linear"])
def test_what_was_trained_is_the_same_adapter_in_peft(kind, on_experts, tmp_path):
    path = save_mixture(tmp_path / "model", kind)
    spec = make_run(path, experts=on_experts, rslora=on_experts)
    model = train(spec, path)
    trained = dict(model.named_parameters())
    assert any(".experts." in name for name in trained) == on_experts
    loss = loss_of(model.module)
    loss.backward()
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({k: p.data.clone() for k, p in trained.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(model, spec)))
    base = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    other = PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    expected = loss_of(other)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert abs(loss.item() - loss_of(AutoModelForCausalLM.from_pretrained(path)).item()) > 1e-3
    for name, parameter in other.named_parameters():
        if parameter.requires_grad:
            gradient = trained.pop(name.replace(".default.", ".")).grad
            assert torch.allclose(gradient, parameter.grad, rtol=1e-6, atol=1e-9), name
    assert not trained


def test_without_the_adapter_the_base_model_answers(tmp_path):
    path = save_mixture(tmp_path, "qwen3_moe")
    model = train(make_run(path, experts=True), path)
    base = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad(), model.module.disable_adapter():
        assert loss_of(model.module).item() == pytest.approx(loss_of(base).item(), rel=1e-9)


def test_a_token_meets_the_adapters_of_its_experts_alone(tmp_path):
    path = save_mixture(tmp_path, "qwen3_moe")
    without, with_experts = (
        read_flops(train(make_run(path, experts=on), path).module) for on in (False, True)
    )
    # Two layers, two experts of eight, rank 4: 64 -> 128 and 64 -> 64.
    assert with_experts.trained - without.trained == 2 * 2 * 4 * (64 + 128 + 64 + 64)
    assert with_experts.frozen == without.frozen


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at every tensor's
def test_layers_compile_in_one_piece(tmp_path):
    path = save_mixture(tmp_path, "qwen3_moe")
    model = train(make_run(path, experts=True), path).module
    expected = gradients(model, loss_of(model))
    layer = model.get_base_model().model.layers[1]
    layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    found = gradients(model, loss_of(model))
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "glm4_moe", "llama4_text"])
def test_nf4_experts_are_those_of_bitsandbytes(kind, tmp_path):
    from bitsandbytes import functional

    path = save_mixture(tmp_path, kind)
    packed = load_model(make_run(path, kind="qlora"), path, CPU)
    whole = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
    with torch.no_grad():
        for name, module in list(packed.named_modules()):
            if isinstance(module, nf4_experts.PackedExperts):
                continue
            other = whole.get_submodule(name)
            if type(module).__name__ == "Linear4bit":
                state = module.weight.quant_state
                other.weight.copy_(functional.dequantize_4bit(module.weight.data, state))
            if nf4_experts.is_experts(module):
                for matrix in nf4_experts.name_matrices(module):
                    parameter, own = getattr(other, matrix), getattr(module, matrix)
                    quantized = functional.quantize_4bit(
                        parameter, quant_type="nf4", compress_statistics=True
                    )
                    parameter.copy_(functional.dequantize_4bit(*quantized))
                    four_bits = nf4_experts.find_packed(module, matrix)
                    assert torch.equal(four_bits.dequantize(), parameter)
                    assert four_bits.nbytes < 0.6 * parameter.numel()
                    # Whoever would multiply with the placeholder notices it.
                    assert own.shape == parameter.shape
                    assert own.isnan().all()
                    assert own.untyped_storage().nbytes() == own.itemsize
        assert loss_of(packed).item() == pytest.approx(loss_of(whole).item(), rel=1e-5)
    kept = {n for n, m in packed.named_modules() if isinstance(m, torch.nn.Linear)}
    assert "lm_head" in kept
    assert type(packed.lm_head) is torch.nn.Linear
    for _, router in nf4_experts.find_routers(packed):
        assert router.weight.dtype == torch.float32


@needs_bitsandbytes
def test_adapters_learn_on_nf4_experts(tmp_path):
    path = save_mixture(tmp_path, "qwen3_moe")
    model = train(make_run(path, kind="qlora", experts=True), path)
    before = loss_of(model.module)
    before.backward()
    learned = [parameter for _, parameter in model.named_parameters()]
    assert all(parameter.grad.isfinite().all() for parameter in learned)
    # A short step, whatever the size of the gradient: a long one may lead beyond the valley.
    length = torch.stack([parameter.grad.norm() for parameter in learned]).norm()
    with torch.no_grad():
        for parameter in learned:
            parameter -= 1e-2 / length * parameter.grad
        assert loss_of(model.module) < before


def test_a_router_keeps_its_own_types_under_autocast(tmp_path):
    model = make_mixture("glm4_moe", torch.bfloat16)
    router = model.model.layers[1].mlp.gate
    hidden = torch.randn(5, 32, dtype=torch.bfloat16)
    expected = router(hidden)
    experts.use_own_products(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.model.layers[1].mlp.gate(hidden)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].dtype == torch.float32


def test_no_logits_of_routers_are_collected():
    model = make_mixture("mixtral", output_router_logits=True)
    assert model(input_ids=IDS).router_logits
    experts.use_own_products(model)
    assert model(input_ids=IDS).router_logits is None


def test_a_model_without_experts_says_so(tiny_model):
    with pytest.raises(ExpectedError, match=r"adapter\.experts is true, but this model has no"):
        train(make_run(tiny_model, experts=True), Path(tiny_model))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout": 0.05}, "dropout is 0.05; it must be 0 with experts: true"),
        ({"dropout": 0.0, "dora": True}, "dora is true; it must be false with experts: true"),
        ({"dropout": 0.0, "kind": "full"}, "experts is true; it must be false with kind full"),
    ],
)
def test_settings_that_experts_do_not_have_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        AdapterSpec(experts=True, **changes)


def test_experts_in_mxfp4_are_trained_in_16_bits_and_not_quantized_again(tmp_path):
    path = save_mixture(tmp_path, "gpt_oss")
    pack_mxfp4(path)
    model = load_model(replace(make_run(path), precision="fp32"), path, CPU)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    # Four bits have the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6, here in eighths.
    values = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert {abs(8 * value) for value in weight.flatten().tolist()} == values
    assert loss_of(model).isfinite()
    with pytest.raises(ExpectedError, match="are in MXFP4 already"):
        load_model(make_run(path, kind="qlora"), path, CPU)

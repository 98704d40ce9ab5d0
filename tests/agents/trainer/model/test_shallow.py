"""Deep models and mixtures of experts in half precision go through the model flat, too."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agents.contract.layer_plan import LayerPlan
from agents.trainer.model import experts, forward, shallow
from agents.trainer.model.dropout import DropoutClock
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import TrainedModel
from tests.agents.trainer.execution.test_layers import make_executor
from tests.agents.trainer.ranks import make_tiny_model
from tests.draws import seed


@pytest.fixture(scope="module")
def mixture():
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=500, hidden_size=256, intermediate_size=256, num_hidden_layers=16,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed(0))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    experts.use_own_products(model)
    with torch.no_grad():
        # So that rounding drifts apart over all layers on every processor, for every seed.
        for name, parameter in model.model.layers.named_parameters():
            parameter.mul_(1 if "norm" in name else 8)
    return model.eval().requires_grad_(False)


def detect(model):
    wrapped = TrainedModel(
        module=model, tokenizer=None, clock=DropoutClock(0), dtype=torch.bfloat16,
        autocast=False, lora=None, plain_template=False,
    )  # fmt: skip
    return Forward(wrapped, torch.device("cpu"))


def test_a_token_that_changes_its_expert_is_no_reason_to_refuse_a_class(mixture, monkeypatch):
    found = detect(mixture)
    assert found.flat
    assert not found.limits
    assert len(mixture.model.layers) == 16
    # Over all layers the two ways to attend do drift apart.
    usual = mixture.config._attn_implementation
    mixture.set_attn_implementation("eager")
    monkeypatch.setattr(shallow, "count_kinds", lambda layers, config: len(layers))
    monkeypatch.setattr(shallow, "most_agree", lambda errors, most: bool(errors.max() <= most))
    assert not detect(mixture).flat
    mixture.set_attn_implementation(usual)


def test_layers_that_magnify_rounding_are_no_reason_to_refuse_a_class(monkeypatch):
    """So 64 layers of a 32B do whose weights were never trained."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=200, hidden_size=128, intermediate_size=512, num_hidden_layers=64,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed(0))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.parameters():
                parameter.mul_(14 if parameter.dim() == 2 else 1)
    found = detect(model)
    assert found.flat
    assert not found.limits
    assert len(model.model.layers) == 64
    model.set_attn_implementation("eager")
    monkeypatch.setattr(forward, "_COMPARED_LAYERS", 64)
    assert not detect(model).flat


def test_what_is_wrong_in_one_segment_is_seen():
    right = torch.full((7,), 0.01)
    assert shallow.most_agree(torch.cat([right, right[:5]]), 0.1)
    assert not shallow.most_agree(torch.cat([right, right[:5] + 1]), 0.1)


def test_each_kind_of_layer_is_among_the_first():
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Conv1d(1, 1, 1), nn.Linear(1, 1)])
    assert shallow.count_kinds(layers, object()) == 3
    assert shallow.count_kinds(layers[:2], object()) == 1
    config = type("Config", (), {"layer_types": ["sliding", "sliding", "sliding", "full"]})
    assert shallow.count_kinds(layers, config()) == 4


def test_layers_with_other_settings_or_shapes_are_other_kinds():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(6))
    for place, layer in enumerate(layers):
        layer.layer_idx, layer.called, layer.window = place + 5, f"layers.{place}", 128
    assert shallow.count_kinds(layers, object()) == 1
    layers[2][1].eps = 0.1
    assert shallow.count_kinds(layers, object()) == 3
    layers[3][0] = nn.Linear(2, 2, bias=False)
    assert shallow.count_kinds(layers, object()) == 4
    layers[4].window = None
    assert shallow.count_kinds(layers, object()) == 5


def test_layers_with_adapters_are_of_one_kind(tmp_path):
    """Each dropout has a name of its own."""
    folder = make_tiny_model(tmp_path / "deep", num_layers=8)
    executor, _ = make_executor(folder, LayerPlan(), compiled=False)
    model = executor._model.module
    assert shallow.count_kinds(model.get_base_model().model.layers, model.config) == 1

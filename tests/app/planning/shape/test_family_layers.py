"""Shapes of all families hold the parameters that their own classes create."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.model.adapter import find_unfit_linears
from agents.trainer.model.stage_opening import KNOWN_ARGUMENTS
from app.errors import UserError
from app.planning.shape.family_table import FAMILIES as READ
from app.planning.shape.model_shape import ModelShape, choose_targets, read_shape
from tests.agents.trainer.model.families import FAMILIES, SMALL, configure_family


def build(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check(shape: ModelShape, model: nn.Module) -> None:
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert [layer.num_parameters for layer in shape.layers] == sizes
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.vocab, shape.num_embedding == model.get_input_embeddings().weight.shape
    assert shape.is_tied == model.config.get_text_config().tie_word_embeddings
    unfit = set(find_unfit_linears(model))
    named = {id(module): name for name, module in model.named_modules()}
    for layer, real in zip(shape.layers, layers, strict=True):
        linears = {
            name: module
            for name, module in real.named_modules()
            if isinstance(module, nn.Linear) and "router" not in name.split(".")
        }
        assert {one.place: (one.num_inputs, one.num_outputs, one.has_bias)
                for one in layer.linears} == {
            name: (one.in_features, one.out_features, one.bias is not None)
            for name, one in linears.items()
        }  # fmt: skip
        adapted = {one.place for one in choose_targets(layer, "all-linear")}
        assert adapted == {n for n, one in linears.items() if named[id(one)] not in unfit}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_class(family):
    config = configure_family(family)
    shape = read_shape(config.to_dict())
    assert shape.is_exact
    check(shape, build(config))
    experts = [p for n, p in build(config).named_parameters() if "experts." in n and p.dim() == 3]
    if experts:
        assert shape.num_experts == len(experts[0])
        assert shape.expert_ffn in experts[0].shape or 2 * shape.expert_ffn in experts[0].shape


# What their classes cannot do without, or cannot divide.
NEEDED: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "intermediate_size": [176] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoehybrid": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
}  # fmt: skip


# Families that one reader takes, each with the layers that it may have.
LIKE_LLAMA: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {"num_experts": 6, "decoder_sparse_step": 2},
    "qwen3_moe": {"num_experts": 6, "mlp_only_layers": [1], "head_dim": 32},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
}


@pytest.mark.parametrize("family", [*READ, *LIKE_LLAMA])
def test_what_a_config_leaves_out_has_the_default_of_its_class(family):
    said: dict[str, Any] = {"model_type": family.split()[0], "vocab_size": 640,
        "num_hidden_layers": 4, "hidden_size": 256, "pad_token_id": 0,
        **NEEDED.get(family, {})}  # fmt: skip
    if family not in ("mamba2", "nemotron_h"):
        said = {"num_attention_heads": 4, "intermediate_size": 176, **said}
    if family in LIKE_LLAMA:
        said = {**said, "num_key_value_heads": 2, **LIKE_LLAMA[family]}
    config = AutoConfig.for_model(**said)
    shape, model = read_shape(said), build(config)
    check(shape, model)
    if family in LIKE_LLAMA:
        assert shape.is_exact
        check(read_shape(config.to_dict()), model)
        quantized = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
        assert shape.num_quantized == sum(m.weight.numel() for m in quantized)
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    odd = inspect.signature(type(layer).forward).parameters.keys() - KNOWN_ARGUMENTS
    assert shape.may_be_cut == (not odd)  # else the trainer refuses a pipeline that a plan chose


def test_the_list_of_nemotron_h_may_be_one_of_letters():
    said = {"model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 99,
            "num_attention_heads": 4, "hybrid_override_pattern": "M-*EM"}  # fmt: skip
    shape = read_shape(said)
    assert [layer.kind for layer in shape.layers] == ["mamba", "none", "attention", "none", "mamba"]
    assert [bool(layer.num_experts_params) for layer in shape.layers][3]


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "TinyLlama": ({"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4}, 1_100_048_384),
    "Llama-3-8B": ({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8}, 8_030_261_248),
    "Llama-2-70B": ({"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8}, 68_976_648_192),
    "Mixtral-8x7B": ({"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704),
    "Qwen2.5-7B": ({"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4}, 7_615_616_512),
    "Gemma-2-2B": ({"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4}, 2_614_341_888),
    "Phi-3-mini": ({"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072,
        "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32}, 3_821_079_552),
    "OLMo-2-7B": ({"model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32}, 7_298_617_344),
    "SmolLM3-3B": ({"model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "tie_word_embeddings": True}, 3_075_098_624),
    "gpt-oss-20b": ({"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_local_experts": 32}, 20_914_757_184),
    "gpt-oss-120b": ({"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_local_experts": 128}, 116_829_156_672),
    "GLM-4-9B-0414": ({"model_type": "glm4", "vocab_size": 151552, "hidden_size": 4096,
        "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 2}, 9_400_279_040),
    "DeepSeek-V3": ({"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128}, 671_026_404_352),
    "Qwen3-Next-80B-A3B": ({"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16},
        79_674_391_296),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_of_their_class(name):
    said, expected = PUBLISHED[name]
    shape = read_shape(said)
    assert shape.num_parameters == expected
    assert expected == sum(p.numel() for p in build(AutoConfig.for_model(**said)).parameters())


@pytest.mark.parametrize(
    "more", [{"layer_types": ["linear_attention"] * 2}, {"kv_lora_rank": 8}, {"state_size": 16}]
)
def test_a_family_whose_layers_are_others_is_refused_by_name(more):
    said = {**SMALL, "model_type": "novel", **more}
    with pytest.raises(UserError, match="does not know the layers of novel models") as caught:
        read_shape(said)
    assert "trains the model without a forecast" in str(caught.value.hint)


def test_a_list_of_layers_that_is_too_short_is_refused():
    said = {**SMALL, "model_type": "qwen3_5_text", "layer_types": ["full_attention"]}
    with pytest.raises(UserError, match="1 layer_types for 2 layers"):
        read_shape(said)

"""Shapes hold exactly the parameters that Transformers' own classes create."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from app.errors import UserError
from app.planning.shape.model_shape import choose_targets, read_shape

SMALL = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
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


def build(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_class(name):
    family = name.split()[0]
    said = {**SMALL, **FAMILIES[name], "model_type": family}
    config = CONFIG_MAPPING[family](**{k: v for k, v in said.items() if k != "model_type"})
    model = build(config)
    layers = [list(layer.parameters()) for layer in model.model.layers]
    linears = {
        path.rpartition(".")[2]: (module.in_features, module.out_features)
        for path, module in model.model.layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for given in (config.to_dict(), said):  # the second leaves out what the family's class adds
        shape = read_shape(given)
        assert shape.is_exact
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
        assert [one.num_parameters for one in shape.layers] == [
            sum(p.numel() for p in params) for params in layers
        ]
        assert shape.num_embedding == model.get_input_embeddings().weight.numel()
        sizes = {
            one.name: (one.num_inputs, one.num_outputs)
            for layer in shape.layers
            for one in layer.linears
        }
        assert sizes == linears
        quantized = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
        assert shape.num_quantized == sum(m.weight.numel() for m in quantized)


REAL = {
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
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_models_have_the_published_number_of_parameters(name):
    config, expected = REAL[name]
    assert read_shape(config).num_parameters == expected


def test_text_inside_a_model_of_images_is_read():
    shape = read_shape(
        {"model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024}}
    )  # fmt: skip
    assert (shape.family, shape.vocab, shape.num_heads, shape.head_dim) == (
        "gemma3_text", 262208, 8, 256,
    )  # fmt: skip
    assert (shape.is_tied, shape.sliding_window) == (True, 1024)


def test_an_unknown_family_is_read_as_a_llama():
    sizes = {**SMALL, "model_type": "novel"}
    assert not read_shape(sizes).is_exact
    assert read_shape(sizes).layers == read_shape({**SMALL, "model_type": "llama"}).layers


@pytest.mark.parametrize("family", ["arcee", "gpt_neox", "nemotron", "starcoder2"])
def test_a_family_whose_mlps_have_no_gate_is_not_taken_for_a_third_larger(family):
    keys = {} if family == "gpt_neox" else {"num_key_value_heads": 4}
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "vocab_size": 96,
    }
    config = CONFIG_MAPPING[family](**sizes, num_attention_heads=8, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(one.numel() for one in model.parameters())
    assert read_shape(config.to_dict()).num_parameters == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("value", [None, "many", 0, True])
def test_a_config_without_sizes_is_refused(value):
    with pytest.raises(UserError, match="hidden_size"):
        read_shape({**SMALL, "model_type": "llama", "hidden_size": value})


def test_a_family_with_sizes_by_other_names_is_trained_without_a_forecast():
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
    with pytest.raises(UserError, match="does not know the sizes of gpt2 models") as caught:
        read_shape(config)
    assert "trains the model without a forecast" in caught.value.hint


def test_layers_are_named_by_all_linear_by_names_or_by_a_pattern():
    ((layer, _),) = read_shape({"model_type": "llama", **SMALL}).kinds
    every = [one.name for one in choose_targets(layer, "all-linear")]
    assert len(every) == 7
    assert [one.name for one in choose_targets(layer, ("v_proj", "up_proj"))] == [
        name for name in every if name in ("v_proj", "up_proj")
    ]
    found = choose_targets(layer, r".*self_attn\.[qv]_proj|.*mlp\.down_proj")
    assert {one.name for one in found} == {"q_proj", "v_proj", "down_proj"}

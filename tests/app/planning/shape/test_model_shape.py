"""Configs are read as far as they are known; `test_family_layers` compares shapes with classes."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from app.errors import UserError
from app.planning.shape.model_shape import choose_targets, read_shape

SMALL = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


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

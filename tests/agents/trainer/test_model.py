"""What is trained of a model, and models and settings that do not go together."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agents.errors import UserError
from agents.spec import AdapterSpec
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.model import load_model, make_trained, refuse_unknown_words
from tests.agents.trainer.ranks import make_spec

CPU = torch.device("cpu")


def train_adapter(folder, **adapter):
    spec = make_spec(adapter=AdapterSpec(rank=4, alpha=8, **adapter))
    model = load_model(spec, folder, CPU)
    tokenizer, plain = load_tokenizer(folder)
    return make_trained(spec, model, tokenizer, plain_template=plain, device=CPU)


def test_named_layers_get_an_adapter_and_no_others(tiny_model):
    found = train_adapter(tiny_model, targets=("q_proj", "layers.1.mlp.down_proj"))
    places = {name.partition(".lora_")[0] for name, _ in found.named_parameters()}
    below = "base_model.model.model.layers"
    assert places == {
        f"{below}.0.self_attn.q_proj", f"{below}.1.self_attn.q_proj", f"{below}.1.mlp.down_proj"
    }  # fmt: skip


def test_a_pattern_means_whole_names(tiny_model):
    found = train_adapter(tiny_model, targets=r".*layers\.1\..*[qk]_proj")
    places = {name.partition(".lora_")[0] for name, _ in found.named_parameters()}
    below = "base_model.model.model.layers.1.self_attn"
    assert places == {f"{below}.q_proj", f"{below}.k_proj"}
    with pytest.raises(UserError, match="means 'the model', too, which is no linear layer"):
        train_adapter(tiny_model, targets=".*")
    with pytest.raises(UserError, match=r"'q_proj\(' is no pattern: missing \)"):
        train_adapter(tiny_model, targets="q_proj(")


def test_one_name_is_that_layer():
    assert AdapterSpec(targets="q_proj").targets == ("q_proj",)
    assert AdapterSpec(targets="all-linear").targets == "all-linear"


@pytest.mark.parametrize("name", ["k_prj", "proj", "embed_tokens", "input_layernorm"])
def test_a_name_that_is_no_linear_layer_is_refused(tiny_model, name):
    with pytest.raises(UserError) as caught:
        train_adapter(tiny_model, targets=("q_proj", name))
    assert caught.value.message == f"adapter.targets: this model has no linear layer {name!r}."
    assert "names out of down_proj, gate_proj, k_proj, lm_head, o_proj" in caught.value.hint


def test_a_tokenizer_may_know_more_than_the_model_as_long_as_the_data_does_not(tiny_model):
    model = load_model(make_spec(), tiny_model, CPU)
    refuse_unknown_words(model, 768, tiny_model)
    with pytest.raises(
        UserError, match=r"made token 768 of the data, and the model knows only 768"
    ):
        refuse_unknown_words(model, 769, tiny_model)


def test_rows_longer_than_learned_positions_are_refused(tmp_path):
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert load_model(make_spec(sequence_tokens=32), tmp_path, CPU)
    with pytest.raises(UserError) as caught:
        load_model(make_spec(sequence_tokens=33), tmp_path, CPU)
    assert "has learned 32 positions, and sequence_tokens is 33" in caught.value.message
    assert caught.value.hint == "Set sequence_tokens to 32"


def test_quantized_weights_are_not_trained_in_full(tiny_model, tmp_path):
    quantized = shutil.copytree(tiny_model, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantized already"):
        load_model(make_spec(adapter=AdapterSpec(kind="full")), quantized, CPU)

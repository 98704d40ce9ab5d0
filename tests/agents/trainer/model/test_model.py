"""What is trained of a model, and models and settings that do not go together."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.quantizers.job.job import JobProgress
from agents.quantizers.merge import merge, read_job
from agents.shared.models.config_findings import NO_TEXT_CLASS, find_config_problems
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.model.causal_class import find_causal_class
from agents.trainer.model.model import build_trained_model, load_model, refuse_unknown_tokens
from tests.agents.trainer.ranks import Run, make_spec
from tests.draws import seed

CPU = torch.device("cpu")


def train_adapter(folder, **adapter):
    spec = make_spec(adapter=AdapterSpec(rank=4, alpha=8, **adapter))
    model = load_model(spec, folder, CPU)
    tokenizer, plain = load_tokenizer(folder)
    return build_trained_model(spec, model, tokenizer, plain_template=plain, device=CPU)


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
    with pytest.raises(
        ExpectedError, match="also matches 'the model', which is not a linear layer"
    ):
        train_adapter(tiny_model, targets=".*")
    with pytest.raises(ValueError, match=r"'q_proj\(', which is not a regular expression: missing"):
        train_adapter(tiny_model, targets="q_proj(")


@pytest.fixture(scope="module", params=["gemma3", "mistral3"])
def seeing_model(tiny_model, tmp_path_factory, request):
    """A model that takes pictures, too; its vision tower has layers named `q_proj` as well."""
    folder = tmp_path_factory.mktemp("seeing") / "model"
    text = {
        "vocab_size": 768, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(seed(1))
    ids = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    if request.param == "gemma3":
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
        Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    else:
        text, vision = {**text, "model_type": "ministral3"}, {**vision, "model_type": "pixtral"}
        other = Mistral3Config(text_config=text, vision_config=vision, image_token_index=5)
        Mistral3ForConditionalGeneration(other).save_pretrained(folder)
    for path in tiny_model.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(tiny_model / "chat_template.jinja", folder)
    return folder


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",), r".*q_proj"])
def test_what_sees_gets_no_adapter(seeing_model, targets):
    found = train_adapter(seeing_model, targets=targets)
    names = [name for name, _ in found.named_parameters()]
    assert names
    assert all(name.startswith("base_model.model.model.language_model.") for name in names)
    kept = {name.split(".")[3] for name, _ in found.module.named_parameters()}
    assert kept == {"language_model"}, "what sees takes no memory"
    with pytest.raises(ExpectedError, match="no linear layer 'fc1'") as caught:
        train_adapter(seeing_model, targets=("fc1",))
    assert "fc1" not in caught.value.hint


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_sees_stays_as_it_was(seeing_model, tmp_path, kind):
    spec = make_spec(max_steps=2, weight_decay=0.5, adapter=AdapterSpec(kind=kind, rank=4))
    run = Run(tmp_path / "home", seeing_model, spec)
    run.train_to_end()
    told = {
        "run_id": "r1",
        "step": 2,
        "model_path": str(seeing_model),
        "destination": str(tmp_path / "merged"),
        "agent_home": str(run.home),
    }
    (tmp_path / "job.json").write_text(json.dumps(told))
    merge(read_job(tmp_path / "job.json"), JobProgress(io.StringIO()))
    before, after = (
        load_file(folder / "model.safetensors") for folder in (seeing_model, tmp_path / "merged")
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("language_model" in name for name in changed)


def test_one_name_is_that_layer():
    assert AdapterSpec(targets="q_proj").targets == ("q_proj",)
    assert AdapterSpec(targets="all-linear").targets == "all-linear"
    assert AdapterSpec(targets=("all-linear",)).targets == "all-linear"


@pytest.mark.parametrize("name", ["k_prj", "proj", "embed_tokens", "input_layernorm"])
def test_a_name_that_is_no_linear_layer_is_refused(tiny_model, name):
    with pytest.raises(ExpectedError) as caught:
        train_adapter(tiny_model, targets=("q_proj", name))
    assert caught.value.message == f"adapter.targets: this model has no linear layer {name!r}."
    assert "names from down_proj, gate_proj, k_proj, lm_head, o_proj" in caught.value.hint


def test_a_tokenizer_may_know_more_than_the_model_as_long_as_the_data_does_not(tiny_model):
    model = load_model(make_spec(), tiny_model, CPU)
    refuse_unknown_tokens(model, 768, tiny_model)
    with pytest.raises(
        ExpectedError, match=r"produced token 768, but the model has only 768 tokens"
    ):
        refuse_unknown_tokens(model, 769, tiny_model)


def test_models_are_refused_by_name_whose_language_model_has_no_class():
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    find_causal_class()  # adds Mistral 3
    assert not NO_TEXT_CLASS & mapping.keys()
    assert {"qwen2_5_vl", "qwen3_vl"} <= NO_TEXT_CLASS
    (found,) = find_config_problems({"model_type": "qwen3_vl", "text_config": {"vocab_size": 9}})
    assert "for pictures or sound in addition to text (qwen3_vl)" in found.message
    for kind in ("gemma3", "mistral3", "qwen3_5", "llama4", "qwen3"):
        assert kind in mapping
        assert not list(find_config_problems({"model_type": kind}))


def test_a_family_that_transformers_lacks_is_named(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_bytes())
    own = {"model_type": "foo9000", "auto_map": {"AutoModelForCausalLM": "modeling_foo.Foo"}}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    with pytest.raises(ExpectedError, match="is of the family 'foo9000', which") as caught:
        load_model(make_spec(), folder, CPU)
    assert "is never run" in caught.value.hint


def test_rows_longer_than_learned_positions_are_refused(tmp_path):
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert load_model(make_spec(sequence_tokens=32), tmp_path, CPU)
    with pytest.raises(ExpectedError) as caught:
        load_model(make_spec(sequence_tokens=33), tmp_path, CPU)
    assert "has learned 32 positions, and sequence_tokens is 33" in caught.value.message
    assert caught.value.hint == "Set sequence_tokens to 32"


def test_quantized_weights_are_not_trained_in_full(tiny_model, tmp_path):
    quantized = shutil.copytree(tiny_model, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExpectedError, match="is already quantized"):
        load_model(make_spec(adapter=AdapterSpec(kind="full")), quantized, CPU)

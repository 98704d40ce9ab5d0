"""A rank loads the parts of a model that it holds, and reads no others."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.model.layer_holdings import LayerHoldings, ModelOutline
from agents.trainer.model.layer_loading import AbsentModule, find_layers
from agents.trainer.model.model import build_trained_model, load_model
from tests.agents.trainer.ranks import make_spec, make_tiny_model

CPU = torch.device("cpu")
SPEC = make_spec(adapter=AdapterSpec(rank=4, alpha=8))


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    return make_tiny_model(folder, num_layers=3, tie_word_embeddings=False)


def load(path, *layers, **ends):
    """Load a model of which a rank holds these layers; return it, and its outline."""
    seen = []

    def choose(outline):
        seen.append(outline)
        held = ("resident" if n in layers else "absent" for n in range(outline.num_layers))
        return LayerHoldings(layers=tuple(held), **ends)

    return load_model(SPEC, path, CPU, choose_layers=choose), seen[0]


@pytest.fixture
def read(monkeypatch):
    """Return the names of all tensors that are read from files."""
    names = []

    class Watched:
        def __init__(self, *args, **more):
            self.plain = safe_open(*args, **more)
            self.keys = self.plain.keys

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.plain.__exit__(*error)

        def get_slice(self, name):
            names.append(name)
            return self.plain.get_slice(name)

    monkeypatch.setattr(modeling_utils, "safe_open", Watched)
    return names


def test_two_halves_compute_what_the_whole_model_does(untied_model, read):
    whole = load_model(SPEC, untied_model, CPU)
    read.clear()
    first, outline = load(untied_model, 0, head=False)
    assert {name.split(".")[2] for name in read if ".layers." in name} == {"0"}
    assert "lm_head.weight" not in read
    assert outline.num_layers == 3
    assert outline.head_bytes == outline.embedding_bytes == 768 * 32 * 4
    read.clear()
    last, _ = load(untied_model, 1, 2, embedding=False)
    assert "model.embed_tokens.weight" not in read
    ids = torch.arange(5)[None]
    with torch.no_grad():
        first.model.norm = torch.nn.Identity()
        hidden = first.model(input_ids=ids).last_hidden_state
        assert torch.equal(last(inputs_embeds=hidden).logits, whole(input_ids=ids).logits)
    halves = {**dict(first.named_parameters()), **dict(last.named_parameters())}
    assert set(halves) == {name for name, _ in whole.named_parameters()}


def test_adapters_are_those_of_the_whole_model_by_name(untied_model):
    def train(model):
        tokenizer, plain = load_tokenizer(untied_model)
        found = build_trained_model(SPEC, model, tokenizer, plain_template=plain, device=CPU)
        return dict(found.named_parameters())

    whole = train(load_model(SPEC, untied_model, CPU))
    part = train(load(untied_model, 1)[0])
    assert set(part) == {name for name in whole if ".layers.1." in name}
    assert all(torch.equal(part[name], whole[name]) for name in part)


def test_a_head_that_is_the_embeddings_brings_them(tiny_model):
    model, outline = load(tiny_model, 1, embedding=False)
    assert outline.head_bytes == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with safe_open(tiny_model / "model.safetensors", framework="pt") as file:
        assert torch.equal(model.lm_head.weight, file.get_tensor("model.embed_tokens.weight"))
    other, _ = load(tiny_model, 0, head=False)
    assert isinstance(other.lm_head, AbsentModule)
    other, _ = load(tiny_model, 0, head=False, embedding=False)
    assert isinstance(other.model.embed_tokens, AbsentModule)
    assert other.model.embed_tokens.num_embeddings == 768


def test_a_missing_tensor_of_a_held_layer_is_named(untied_model, tmp_path):
    with pytest.raises(ExpectedError, match=r"layers\.1\.input_layernorm\.weight and 8 more are"):
        load(_without_layer(untied_model, tmp_path, 1), 0, 1)
    assert load(_without_layer(untied_model, tmp_path, 1), 0, 2)


def _without_layer(path, folder, layer):
    from safetensors.torch import load_file, save_file

    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if f".layers.{layer}." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_without_a_stack_is_named():
    loose = torch.nn.Module()
    loose.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    assert find_layers(loose) == []
    outline = ModelOutline(class_name="Loose", layer_bytes=(), embedding_bytes=1, head_bytes=1)
    with pytest.raises(ExpectedError, match=r"parallel: pipeline needs .* those of Loose cannot"):
        outline.require_layers("pipeline")


def test_layers_that_share_weights_are_not_divided(tmp_path):
    config = AutoConfig.for_model(
        "zamba", vocab_size=97, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, num_hidden_layers=6, attn_layer_period=3, attn_layer_offset=2,
        mamba_d_state=4, n_mamba_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shared = r"those of ZambaForCausalLM share model\.layers\.5\.shared_transf"
    with pytest.raises(ExpectedError, match=shared) as caught:
        load_model(SPEC, tmp_path, CPU, choose_layers=lambda one: one.require_layers("streamed"))
    assert "parallel: data" in caught.value.hint

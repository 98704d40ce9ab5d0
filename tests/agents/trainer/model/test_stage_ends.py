"""Stages of real families, one behind the other, compute what the whole model computes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agents.contract.spec import AdapterSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.checkpoint.state import adapter_config
from agents.trainer.data.examples import Example, Segment
from agents.trainer.model.experts import list_adapted
from agents.trainer.model.forward import Forward
from agents.trainer.model.layer_holdings import LayerHoldings, hold_everything
from agents.trainer.model.micro_batch import MicroBatch, build_micro_batch
from agents.trainer.model.model import TrainedModel, build_trained_model, load_model
from agents.trainer.model.stage_opening import open_stage, place_trained
from tests.agents.trainer.ranks import make_spec
from tests.draws import seed

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MIXED = ["linear_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen3_5_text": {
        "layer_types": MIXED, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3,
    },
    "falcon_h1": {  # its class sets a buffer of every layer
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2,
        "mamba_d_ssm": 64, "mamba_chunk_size": 4,
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 4, "expand": 2,
    },
    "llama4_text": {  # its class asks the embedding for its device
        "moe_layers": [1], "num_local_experts": 4, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 40, "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1, 1],
        "layer_types": ["chunked_attention", "full_attention", *["chunked_attention"] * 2],
    },
    "gptj": {  # its class takes the first of several results of a layer
        "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 64,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},  # embeddings narrower than features
}  # fmt: skip
TARGETS = {"opt": ("q_proj", "v_proj"), "qwen3": ("q_proj", "lm_head")}
SPEC = make_spec(precision="fp64", adapter=AdapterSpec(rank=2, dropout=0.1))


def make_example(lengths: tuple[int, ...]) -> Example:
    """Return segments of these lengths in which all tokens but the first count."""
    return Example(
        tuple(
            Segment(0, np.arange(3, 3 + size, dtype=np.int32) * 7 % 90, np.arange(size) > 0)
            for size in lengths
        )
    )


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param) / request.param
    return save(path, **FAMILIES[request.param])


def save(path: Path, **sizes: Any) -> Path:
    """Save a model of the family that the folder is named by."""
    torch.manual_seed(seed(5))
    config = AutoConfig.for_model(path.name, **{**SIZES, **sizes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def load(
    folder: Path, first: int | None = None, stop: int = 0, spec: RunSpec = SPEC
) -> TrainedModel:
    """Return the whole model, or a stage of it, with an adapter that changes something."""
    targets = TARGETS.get(folder.name, spec.adapter.targets)
    spec = replace(spec, adapter=replace(spec.adapter, targets=targets))

    def choose(outline: Any) -> LayerHoldings:
        if first is None:
            return hold_everything(outline)
        return LayerHoldings(
            layers=tuple(
                "resident" if first <= n < stop else "absent" for n in range(outline.num_layers)
            ),
            embedding=first == 0,
            head=stop == outline.num_layers,
        )

    base = load_model(spec, folder, CPU, choose_layers=choose)
    model = build_trained_model(spec, base, None, plain_template=False, device=CPU)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first
            values = torch.linspace(-0.1, 0.1, parameter.numel(), dtype=parameter.dtype)
            parameter.data = values.view_as(parameter)
    return model if first is None else open_stage(model, first, stop, CPU)


def keyed(model: TrainedModel, batch: MicroBatch) -> MicroBatch:
    model.clock.set([7], batch.lengths, batch.num_tokens, CPU)
    return batch


def test_stages_in_a_row_are_the_whole_model(folder):
    batch = build_micro_batch([make_example((9, 6, 5))], CPU)
    whole = load(folder)
    forward = Forward(whole, CPU)
    expected = forward.features(keyed(whole, batch))
    with forward.without_adapter():
        plain = forward.features(batch)
    hidden = plain_hidden = None
    names: list[str] = []
    for first, stop in ((0, 1), (1, 3), (3, 4)):
        stage = load(folder, first, stop)
        assert stage.stage is not None
        passes = Forward(stage, CPU)
        fed = nullcontext() if hidden is None else stage.stage.fed(hidden, plain_hidden)
        take = passes.features if stop == 4 else passes.outputs
        with fed:
            new = take(keyed(stage, batch))
            with passes.without_adapter():
                plain_hidden = take(batch)
        hidden = new
        places = place_trained(stage)
        assert {place.layer for place in places.values()} == set(range(first, stop))
        names += places
    assert torch.allclose(hidden, expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(plain_hidden, plain, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(plain, expected, rtol=1e-3)
    assert names == [name for name, _ in whole.named_parameters()]


def test_a_stage_without_a_sliding_window_takes_packed_rows(tmp_path):
    folder = save(tmp_path / "gemma2", **FAMILIES["gemma2"])
    spec = make_spec(precision="fp32", adapter=AdapterSpec(rank=2))
    for first, stop in ((0, 1), (1, 2), (2, 4)):
        passes = Forward(load(folder, first, stop, spec), CPU)
        assert passes.flat
        assert not passes.limits


def test_a_stage_describes_the_adapter_of_the_whole_model(tmp_path):
    """One without experts among its layers describes those of the others, too."""
    more = {"first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 1}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1}
    folder = save(tmp_path / "glm4_moe", **more, **experts)
    adapter = AdapterSpec(rank=2, dropout=0, experts=True, targets=("q_proj", "up_proj"))
    spec = make_spec(precision="fp64", adapter=adapter)
    whole = load(folder, spec=spec)
    stages = [load(folder, first, first + 2, spec) for first in (0, 2)]
    adapted = tuple(name for stage in stages for name in list_adapted(stage.module))
    names = [name for stage in stages for name in place_trained(stage)]
    assert names == [name for name, _ in whole.named_parameters()]
    for stage in stages:
        assert stage.stage is not None
        stage.stage.adapted = adapted
        assert adapter_config(stage, spec) == adapter_config(whole, spec)


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("gemma3n_text", {
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "laurel_rank": 4,
            "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4,
        }, "its layers take per_layer_input"),
        ("hrm_text", {"vocab_size": 97}, "it changes features between two layers"),
        ("bamba", {
            "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "attn_layer_indices": [1],
            "mamba_n_groups": 2, "mamba_chunk_size": 4,
        }, "it takes several results of each layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(tmp_path, kind, more, why):
    folder = save(tmp_path / kind, **more)
    with pytest.raises(ExpectedError, match=f"ForCausalLM cannot be cut .* {why}"):
        load(folder, 0, 2)


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (("q_proj", "project_in"), "The adapter has model.decoder.project_in, which is no part"),
        (r".*layers[.][3][.].*q_proj", "Layers 1 to 2 of the model have nothing to train"),
        ("nothing", "this model has no linear layer 'nothing'"),
    ],
)
def test_an_adapter_that_no_stage_can_have_is_refused(tmp_path, monkeypatch, targets, why):
    folder = save(tmp_path / "opt", **FAMILIES["opt"])
    monkeypatch.setitem(TARGETS, "opt", targets)
    with pytest.raises(ExpectedError, match=why):
        load(folder, 0, 2)

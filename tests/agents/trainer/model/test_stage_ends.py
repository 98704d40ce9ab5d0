"""Stages of real families, one behind the other, compute what the whole model computes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer.data.examples import Example, Segment
from agents.trainer.model.forward import Forward
from agents.trainer.model.layer_holdings import LayerHoldings, hold_everything
from agents.trainer.model.micro_batch import MicroBatch, build_micro_batch
from agents.trainer.model.model import TrainedModel, build_trained_model, load_model
from agents.trainer.model.stage_opening import open_stage, place_trained
from tests.agents.trainer.ranks import make_spec

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
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 4},
}
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
    name = request.param
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name])
    path: Path = tmp_path_factory.mktemp(name)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    return path


def load(folder: Path, first: int | None = None, stop: int = 0) -> TrainedModel:
    """Return the whole model, or a stage of it, with an adapter that changes something."""

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

    base = load_model(SPEC, folder, CPU, choose_layers=choose)
    model = build_trained_model(SPEC, base, None, plain_template=False, device=CPU)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first
            parameter.data = (
                torch.linspace(-0.1, 0.1, parameter.numel()).double().view_as(parameter)
            )
    return model if first is None else open_stage(model, first, stop)


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
        assert passes.flat == forward.flat
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


def test_layers_that_take_more_than_features_are_refused(tmp_path):
    sizes = {**SIZES, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    more = {"laurel_rank": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4}
    config = transformers.Gemma3nTextConfig(**sizes, **more)
    transformers.Gemma3nForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ExpectedError, match=r"Gemma3nForCausalLM cannot be cut .* per_layer_input"):
        load(tmp_path, 0, 2)

"""Weights take as many bytes as the trainer's own loading gives them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.trainer.model.model import load_model
from agents.trainer.model.nf4_experts import PackedExperts
from app.planning.memory.forecast import GIB, GpuMemory, MemorySetting, estimate_memory
from app.planning.shape.model_shape import read_shape
from tests.agents.trainer.ranks import make_tiny_model

SIZES = {"hidden_size": 256, "intermediate_size": 640}
CODES_BYTES = 4 * (256 + 16) + 64
"""Of each matrix: the two tables of values, and an offset."""


def count_bytes(model):
    """Return the bytes of a model's parameters, those of their constants included."""
    total = 0
    total += sum(one.nbytes for one in model.modules() if isinstance(one, PackedExperts))
    for parameter in model.parameters():
        total += parameter.untyped_storage().nbytes()  # that of packed experts is a placeholder
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            parts = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
            total += sum(part.numel() * part.element_size() for part in parts)
    return total


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    dense = make_tiny_model(tmp_path_factory.mktemp("dense"), 2, **SIZES)
    mixture = make_tiny_model(tmp_path_factory.mktemp("mixture"), 2)
    config = MixtralConfig(
        vocab_size=768, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, **SIZES,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(mixture)
    return {"dense": dense, "mixture": mixture}


@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_weights_and_constants_are_those_that_are_loaded(name, kind, folders):
    spec = RunSpec(
        model="m", data=DataSpec(train="d"), adapter=AdapterSpec(kind=kind), precision="bf16"
    )
    folder = folders[name]
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    model = load_model(spec, folder, torch.device("cpu"))
    memory = estimate_memory(
        shape,
        spec,
        setting=MemorySetting(micro_tokens=64),
        longest_tokens=64,
        gpu=GpuMemory(total_bytes=GIB),
    )
    found = count_bytes(model)
    num_packed = len(shape.layers[0].linears) + 2 * (name == "mixture")
    codes = CODES_BYTES * 2 * num_packed if kind == "qlora" else 0
    assert found == pytest.approx(memory.weights_bytes + memory.constants_bytes, abs=codes)
    if name == "mixture" and kind == "qlora":
        assert memory.weights_bytes < shape.num_parameters

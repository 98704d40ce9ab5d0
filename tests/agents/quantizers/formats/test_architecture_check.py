"""A model whose layers gptqmodel divides is refused before the work, and no other."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from agents.errors import ExpectedError
from agents.quantizers.formats.architecture_check import refuse_divided

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": None,
}


def load(folder):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_phi_3_as_gptqmodel_has_it_is_refused(tmp_path):
    Phi3ForCausalLM(Phi3Config(**TINY)).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    refuse_divided(tmp_path, loaded)
    for layer in loaded.model.layers:
        del layer.mlp.gate_up_proj
        layer.mlp.gate_proj = layer.mlp.up_proj = torch.nn.Linear(32, 64, device="meta")
    with pytest.raises(ExpectedError, match=r"divides mlp\.gate_up_proj") as caught:
        refuse_divided(tmp_path, loaded)
    assert "AutoAWQ" in caught.value.hint


def test_names_that_transformers_has_changed_say_nothing(tmp_path):
    MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=2)).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    for layer in loaded.model.layers:  # one module for each expert, as in the file
        layer.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(32, 64) for _ in range(2))
    refuse_divided(tmp_path, loaded)

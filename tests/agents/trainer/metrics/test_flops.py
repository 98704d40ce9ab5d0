"""The formulas' worked numbers, and counts read off real (tiny) models."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from agents.trainer.metrics.flops import read_flops

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_model_by_kind(tied):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    counted = read_flops(model)
    assert (counted.frozen, counted.trained) == (0, 2 * LAYER)
    assert (counted.head, counted.head_trained) == (128 * 32, True)
    assert (counted.attention_width, counted.num_layers) == (32, 2)


def test_an_adapter_is_all_that_is_trained():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    counted = read_flops(get_peft_model(model, lora))
    assert counted.frozen == 2 * LAYER
    assert counted.trained == 2 * 4 * (32 + 32 + 32 + 16)
    assert (counted.head, counted.head_trained) == (128 * 32, False)


def test_the_text_of_a_model_that_sees_has_its_attention_counted():
    seen = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
    text = {**SHAPE, "head_dim": 16}
    config = Gemma3Config(text_config=text, vision_config={**seen, "num_attention_heads": 2})
    counted = read_flops(Gemma3ForConditionalGeneration(config))
    assert (counted.attention_width, counted.num_layers) == (4 * 16, 2)


def test_a_token_meets_few_of_the_experts():
    config = MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)
    counted = read_flops(MixtralForCausalLM(config))
    attention = 32 * 32 * 2 + 32 * 16 * 2
    met = 2 * (attention + 2 * 3 * 32 * 64)
    assert counted.trained == pytest.approx(met, rel=0.02), "the router is small"


def test_a_quantized_layer_counts_by_its_shape():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False)
    layer.to("cpu")
    assert layer.weight.numel() < 64 * 32, "two weights share a byte"
    assert read_flops(torch.nn.Sequential(layer)).frozen == 64 * 32


def test_packed_rows_cost_less_attention_than_one_long_row():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    counted = read_flops(model)
    long, packed = counted.count([64], 63), counted.count([32, 32], 63)
    assert long - packed == 6 * 2 * 32 * (64**2 - 2 * 32**2)

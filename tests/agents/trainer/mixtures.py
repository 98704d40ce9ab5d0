"""Tiny mixtures of experts of many families."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.agents.trainer.ranks import DEMO

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "gpt_oss": {},  # transposed, with biases, interleaved and clamped
    "glm4_moe": _GROUPS,  # a dense layer, groups, a shared expert, a router in float32
    "granitemoe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "deepseek_v3": {**_GROUPS, **_LATENT},
    "olmoe": {},
    "gemma4_text": {
        "enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 97,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phimoe": {},
}  # fmt: skip


def make_mixture(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model that computes its experts by its class's own loop."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind], **changes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that routing matters
    return model


def save_mixture(folder: Path, kind: str, **changes: Any) -> Path:
    """Save a model that the demo's tokenizer suits, with experts that NF4 suits."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "head_dim": 16,
    }
    make_mixture(kind, vocab_size=768, **sizes, **changes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / name, folder / name)
    return folder

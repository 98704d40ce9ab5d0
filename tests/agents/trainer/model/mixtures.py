"""Tiny mixtures of experts of many families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.agents.trainer.ranks import DEMO
from tests.draws import seed

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
    "llama4_text": {  # transposed, weights of the router on what goes in
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "attention_chunk_size": 8, "moe_layers": [1], "intermediate_size_mlp": 40,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
    },
}  # fmt: skip


def make_mixture(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model that computes its experts by its class's own loop."""
    torch.manual_seed(seed(3))
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


def pack_mxfp4(folder: Path) -> None:
    """Put random experts in MXFP4 into a saved gpt-oss, as its published files have them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        stored = tensors.pop(name).shape  # (E, I, O)
        draw = torch.Generator().manual_seed(seed(len(name)))
        size = (stored[0], stored[2], stored[1] // 32)
        blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.full(size, 124, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))

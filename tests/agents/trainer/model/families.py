"""Tiny models of every family that is fine-tuned today, with one layer of each kind that it has.

`SEEN` was at hand while the code was written; `UNSEEN` has other sizes, odd numbers of heads, other
biases and ties, and was tried afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from agents.contract.spec import AdapterSpec, RunSpec
from agents.trainer.model.model import TrainedModel, build_trained_model
from tests.agents.trainer.ranks import make_spec
from tests.draws import seed

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HALF = ["sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = {
    "layer_types": LINEAR, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3,
}  # fmt: skip
FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 4,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, **FEW_EXPERTS,
}  # fmt: skip

SEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 5}),
    "Ministral": ("ministral", {"sliding_window": 5, "layer_types": HALF}),
    "Ministral 3": ("ministral3", {}),
    "Qwen2.5": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": HALF}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", FEW_EXPERTS),
    "Qwen3-Next": ("qwen3_next", {
        **DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 16,
    }),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {
        "sliding_window": 5, "layer_types": HALF, "final_logit_softcapping": 3.0,
    }),
    "Gemma 3": ("gemma3_text", {"sliding_window": 5, "layer_types": HALF}),
    "Gemma 3n": ("gemma3n_text", {
        "sliding_window": 5, "layer_types": HALF * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
        "activation_sparsity_pattern": [0.0] * 4,
    }),
    "Gemma 4": ("gemma4_text", {
        "sliding_window": 5, "layer_types": HALF * 2, "num_hidden_layers": 4, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    }),
    "Phi": ("phi", {"num_key_value_heads": 4}),
    "Phi-4": ("phi3", {"sliding_window": 5}),
    "Cohere": ("cohere", {}),
    "Command A": ("cohere2", {"sliding_window": 5, "layer_types": HALF}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": 5, "layer_types": HALF}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "GLM-4": ("glm4", {}),
    "GLM-4.5": ("glm4_moe", {
        **FEW_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    }),
    "gpt-oss": ("gpt_oss", {"sliding_window": 5, "layer_types": HALF, **FEW_EXPERTS}),
    "Granite": ("granite", {"logits_scaling": 4.0}),
    "Granite 4": ("granitemoehybrid", {
        **MAMBA, **FEW_EXPERTS, "layers_block_type": LINEAR, "layer_types": LINEAR,
        "shared_intermediate_size": 24,
    }),
    "Llama 4": ("llama4_text", {
        **FEW_EXPERTS, "num_hidden_layers": 3, "attention_chunk_size": 6, "floor_scale": 4,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1], "moe_layers": [1], "intermediate_size_mlp": 40,
    }),
    "DeepSeek-V2": ("deepseek_v2", {
        **LATENT, "topk_method": "greedy", "mlp_layer_types": ["dense", "sparse"],
    }),
    "DeepSeek-V3": ("deepseek_v3", LATENT),
    "Falcon-H1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "Nemotron-H": ("nemotron_h", {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2,
        "chunk_size": 4,
    }),
    "LFM2": ("lfm2", {
        "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8,
    }),
    "Mamba 2": ("mamba2", {
        "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 4, "expand": 2,
    }),
}  # fmt: skip

UNSEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3, biased and tied": ("llama", {
        "hidden_size": 30, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 10, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": True,
    }),
    "Qwen3, one key head": ("qwen3", {
        "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12, "attention_bias": True,
    }),
    "Qwen3-Next, dense first": ("qwen3_next", {
        **FEW_EXPERTS, "shared_expert_intermediate_size": 20, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_only_layers": [0], "linear_num_value_heads": 6, "linear_num_key_heads": 3,
        "linear_key_head_dim": 7, "linear_value_head_dim": 9, "linear_conv_kernel_dim": 4,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12,
    }),
    "Qwen3.5, equal heads": ("qwen3_5_text", {
        "layer_types": LINEAR, "linear_num_value_heads": 3, "linear_num_key_heads": 3,
        "linear_key_head_dim": 5, "linear_value_head_dim": 8, "tie_word_embeddings": True,
    }),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {
        **DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 16,
    }),
    "Gemma 3, wide heads": ("gemma3_text", {
        "sliding_window": 3, "num_hidden_layers": 3, "head_dim": 14,
        "hidden_size": 30, "num_attention_heads": 3,
        "num_key_value_heads": 1, "layer_types": [*HALF, "sliding_attention"],
    }),
    "Gemma 3n, three readers": ("gemma3n_text", {
        "layer_types": ["full_attention"] * 4, "num_hidden_layers": 4, "num_kv_shared_layers": 3,
        "intermediate_size": [40] * 4, "laurel_rank": 3, "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 97, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2, "num_key_value_heads": 1,
    }),
    "Gemma 4, shared values": ("gemma4_text", {
        "sliding_window": 4, "layer_types": HALF, "global_head_dim": 12, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    }),
    "Phi-4, partial angles": ("phi3", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "OLMo 3, tied": ("olmo3", {
        "sliding_window": 7, "layer_types": HALF, "tie_word_embeddings": True,
        "attention_bias": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
    }),
    "SmolLM3, untied": ("smollm3", {
        "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "tie_word_embeddings": False,
    }),
    "GLM-4.5, normed heads": ("glm4_moe", {
        **FEW_EXPERTS, "n_routed_experts": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "use_qk_norm": True, "attention_bias": True,
    }),
    "gpt-oss, six heads": ("gpt_oss", {
        "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 3,
        "num_experts_per_tok": 1,
    }),
    "Granite 4, dense": ("granitemoehybrid", {
        "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_d_state": 5, "mamba_n_groups": 3,
        "mamba_expand": 2, "hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3,
        "head_dim": 10, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "num_local_experts": 0, "shared_intermediate_size": 40, "tie_word_embeddings": True,
        "layer_types": LINEAR, "layers_block_type": LINEAR, "position_embedding_type": "rope",
    }),
    "Falcon-H1, normed": ("falcon_h1", {
        **MAMBA, "mamba_n_groups": 1, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 1.5, 1.0, 0.7, 1.2], "key_multiplier": 0.8,
    }),
    "Nemotron-H, experts": ("nemotron_h", {
        **FEW_EXPERTS, "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 7, "n_groups": 1,
        "chunk_size": 8, "moe_shared_expert_intermediate_size": 20, "n_routed_experts": 4,
        "num_hidden_layers": 3,
    }),
    "LFM2, biased": ("lfm2", {
        "layer_types": ["full_attention", "conv", "conv"], "num_hidden_layers": 3,
        "conv_L_cache": 4, "conv_bias": True, "block_auto_adjust_ff_dim": False,
    }),
    "DeepSeek-V3, direct queries": ("deepseek_v3", {
        **LATENT, "q_lora_rank": None, "num_attention_heads": 2, "num_key_value_heads": 2,
        "first_k_dense_replace": 0, "v_head_dim": 10,
    }),
    "Llama 4, alternating": ("llama4_text", {
        **FEW_EXPERTS, "num_hidden_layers": 2, "attention_chunk_size": 4, "floor_scale": 3,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "intermediate_size_mlp": 36,
        "use_qk_norm": False, "num_attention_heads": 6, "num_key_value_heads": 3,
    }),
}  # fmt: skip


FAMILIES = {**SEEN, **UNSEEN}


def configure_family(name: str) -> PreTrainedConfig:
    """Return the config of a family's tiny model."""
    kind, more = FAMILIES[name]
    return AutoConfig.for_model(kind, **{**SMALL, **more})


def make_family(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model with random weights, large enough that attention and caps matter."""
    torch.manual_seed(seed(3))
    model = AutoModelForCausalLM.from_config(configure_family(name), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def adapt_all(dropout: float) -> RunSpec:
    """Return a run that adapts all linear layers."""
    return make_spec(adapter=AdapterSpec(rank=2, alpha=4, targets="all-linear", dropout=dropout))


def adapt(model: nn.Module, dropout: float) -> TrainedModel:
    """Give every linear layer an adapter that changes its output; none to those of experts."""
    spec = adapt_all(dropout)
    adapted = build_trained_model(
        spec, model, None, plain_template=False, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(seed(5))
    for name, parameter in adapted.module.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return adapted

"""Table of model families: the reader of their layers, and the defaults of their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.planning.shape.config_reader import ConfigReader
from app.planning.shape.family_layers import (
    count_per_layer_inputs,
    count_streams,
    read_cohere,
    read_deepseek,
    read_falcon_h1,
    read_gemma3n,
    read_gemma4,
    read_glm4,
    read_glm4_moe,
    read_gpt_oss,
    read_granite_hybrid,
    read_lfm2,
    read_llama,
    read_llama4,
    read_mamba2,
    read_nemotron_h,
    read_olmo,
    read_phi,
    read_qwen_hybrid,
    read_unbiased,
)
from app.planning.shape.layer_shape import LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Reader and defaults of one family's configs."""

    read: Callable[[ConfigReader, int], LayerShape]
    """Returns the layer at an index."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of its configuration class for keys that config.json leaves out."""
    ffn: tuple[str, ...] = ("intermediate_size",)
    """Keys of the width of a dense MLP."""
    expert_ffn: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    """Keys of the width of one expert."""
    count_outside: Callable[[ConfigReader], int] = lambda config: 0
    """Returns the number of parameters outside of embedding, layers, last norm and head."""
    may_be_cut: bool = True
    """True if layers pass only features to the next one, so that a pipeline can divide them."""


_MISTRAL = {"num_key_value_heads": 8}
_TIED = {"tie_word_embeddings": True}
_DELTA = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256,
}  # fmt: skip
_QWEN_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 128, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_d_conv": 4, "mamba_conv_bias": True,
}  # fmt: skip
_PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}

FAMILIES: dict[str, Family] = {
    "ministral": Family(read=read_unbiased, defaults={**_MISTRAL, "sliding_window": 4096}),
    "ministral3": Family(read=read_unbiased, defaults={**_MISTRAL, "head_dim": 128}),
    "smollm3": Family(read=read_llama, defaults={"num_key_value_heads": 4, **_TIED}),
    "granite": Family(read=read_llama),
    "cohere": Family(read=read_cohere, defaults=_TIED),
    "cohere2": Family(read=read_cohere, defaults={**_TIED, "sliding_window": 4096}),
    "olmo2": Family(read=read_olmo),
    "olmo3": Family(read=read_olmo, defaults={"sliding_window": 4096}),
    "glm4": Family(read=read_glm4, defaults={
        "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
    }),
    "glm4_moe": Family(read=read_glm4_moe, defaults={
        "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
    }),
    "deepseek_v2": Family(read=read_deepseek, defaults={
        **_LATENT, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
    }),
    "deepseek_v3": Family(read=read_deepseek, defaults={
        **_LATENT, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    }),
    "gpt_oss": Family(read=read_gpt_oss, expert_ffn=("intermediate_size",), defaults={
        "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128,
        "num_local_experts": 128, "num_experts_per_tok": 4,
    }),
    "llama4_text": Family(read=read_llama4, ffn=("intermediate_size_mlp",),
        expert_ffn=("intermediate_size",), defaults={
            "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
            "num_experts_per_tok": 1, "intermediate_size_mlp": 16384,
        }),
    "phi": Family(read=read_phi, count_outside=lambda config: (
        config.number("hidden_size") + config.number("vocab_size")  # biases of last norm and head
    )),
    "gemma3n_text": Family(read=read_gemma3n, count_outside=count_streams, may_be_cut=False,
        defaults={
        **_TIED, **_PER_LAYER, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "num_kv_shared_layers": 15, "laurel_rank": 64, "altup_num_inputs": 4,
    }),
    "gemma4_text": Family(read=read_gemma4, count_outside=count_per_layer_inputs, may_be_cut=False,
        defaults={
        **_TIED, **_PER_LAYER, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512,
    }),
    "qwen3_next": Family(
        read=lambda config, place: read_qwen_hybrid(config, place, is_split=False),
        defaults={**_DELTA, **_QWEN_EXPERTS, "num_key_value_heads": 2, "num_experts": 512,
                  "num_experts_per_tok": 10},
    ),
    "qwen3_5_text": Family(
        read=lambda config, place: read_qwen_hybrid(config, place, is_split=True),
        defaults={**_DELTA, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe_text": Family(
        read=lambda config, place: read_qwen_hybrid(config, place, is_split=True),
        defaults={**_DELTA, **_QWEN_EXPERTS, "num_key_value_heads": 2, "num_experts": 256,
                  "num_experts_per_tok": 8},
        ffn=("intermediate_size", "shared_expert_intermediate_size"),
    ),
    "granitemoehybrid": Family(read=read_granite_hybrid, ffn=("shared_intermediate_size",),
        expert_ffn=("intermediate_size",), defaults={
            **_MAMBA, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        }),
    "falcon_h1": Family(read=read_falcon_h1, defaults={
        **_MAMBA, "num_key_value_heads": 8, "mamba_d_ssm": 1024,
    }),
    "nemotron_h": Family(read=read_nemotron_h, defaults={
        "num_attention_heads": 32, "intermediate_size": 21504, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    }),
    "lfm2": Family(read=read_lfm2, ffn=("block_ff_dim", "intermediate_size"), defaults={
        **_TIED, "num_key_value_heads": 8, "conv_L_cache": 3, "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
    }),
    "mamba2": Family(read=read_mamba2, ffn=("hidden_size",), defaults={
        "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "use_conv_bias": True, "expand": 2,
    }),
}  # fmt: skip
"""Families by the `model_type` of their text model."""

"""Judge a model's config.json before any computation with it: its sizes and its purpose.

A config is untrusted: a billion layers would fill all memory of a plan, and a text instead of a
number would look like a bug. Only given values are checked; missing ones have the default of the
family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from agents.shared.models.findings import ORIGINAL, OTHER_MODEL, ModelFinding, show

_Limits = tuple[int, int]
_LAYERS: _Limits = (1, 10_000)
_WIDTH: _Limits = (1, 1 << 20)
_INNER: _Limits = (1, 1 << 24)
_HEADS: _Limits = (1, 1 << 16)
_EXPERTS: _Limits = (0, 1 << 16)
_TOKENS: _Limits = (1, 1 << 31)
_TAPS: _Limits = (1, 1 << 10)
LIMITS: dict[str, _Limits] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), _INNER),
    "shared_expert_intermediate_size": (0, _INNER[1]),
    "vocab_size": (1, 1 << 27),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "decoder_sparse_step"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), _TOKENS),
    "sliding_window": (0, _TOKENS[1]),
    # Mixers that carry a state, latent attention, inputs of each layer.
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "mamba_n_heads"), _HEADS),
    **dict.fromkeys(("mamba_num_heads", "num_heads", "num_global_key_value_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "global_head_dim"), _WIDTH),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "laurel_rank"), _WIDTH),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _WIDTH),
    **dict.fromkeys(("q_lora_rank", "hidden_size_per_layer_input"), (0, _WIDTH[1])),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp", "block_ff_dim"), _INNER),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "mamba_d_ssm"), _INNER),
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"), _TAPS),
    **dict.fromkeys(("conv_L_cache", "altup_num_inputs", "mamba_expand"), _TAPS),
    **dict.fromkeys(
        ("n_shared_experts", "first_k_dense_replace", "num_kv_shared_layers"), _EXPERTS
    ),
}
"""Minimum and maximum of each size, far beyond any existing model."""
# Numbers whose infinity or NaN would spread to the weights.
_FINITE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta",
           "initializer_range", "attention_dropout", "hidden_act_alpha")  # fmt: skip
_LISTS = ("mlp_only_layers", "layer_types", "layers_block_type", "moe_layers", "architectures")
_MAPPINGS = ("text_config", "quantization_config", "rope_scaling", "rope_parameters")
TRAINABLE_METHODS = ("bitsandbytes", "mxfp4")
"""Values of quant_method whose weights an adapter can be trained on."""
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
"""Suffixes of the class names of models that may be language models."""
_ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "distilbert", "albert", "electra",
    "deberta", "deberta-v2", "mpnet", "camembert", "modernbert", "nomic_bert", "longformer",
    "big_bird", "ernie", "esm", "flaubert", "funnel", "ibert", "layoutlm", "luke",
    "megatron-bert", "mobilebert", "mra", "nezha", "nystromformer", "rembert", "roformer",
    "splinter", "squeezebert", "vit", "clip", "siglip", "wav2vec2", "hubert", "whisper",
})  # fmt: skip
NO_TEXT_CLASS = frozenset({
    "aria", "aya_vision", "blip", "blip-2", "chameleon", "cohere2_vision", "deepseek_vl",
    "deepseek_vl_hybrid", "florence2", "glm46v", "glm4v", "glm4v_moe", "granite_speech", "idefics",
    "idefics2", "idefics3", "instructblip", "internvl", "janus", "kosmos-2", "lfm2_vl", "llava",
    "llava_next", "llava_next_video", "llava_onevision", "ovis2", "paligemma",
    "perception_lm", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_omni_moe",
    "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llava", "vipllava", "voxtral",
})  # fmt: skip
"""Types of multimodal models whose language model Transformers cannot load alone."""


def find_config_problems(config: Mapping[str, Any]) -> Iterator[ModelFinding]:
    """Yield the reasons against training that a config alone shows."""
    for text in find_odd_sizes(config):
        yield ModelFinding(
            kind="config",
            message=f"has a config.json in which {text}",
            hint="Download the config again, or name another model",
            file="config.json",
        )
        # With such sizes, the other checks would report consequences.
        return
    yield from _find_other_kind(config)
    method = quantization_of(config)
    if method and method not in TRAINABLE_METHODS:
        yield ModelFinding(
            kind="quantized",
            message=f"is quantized ({show(method)[1:-1]}), and nothing can be trained on it",
            hint=ORIGINAL,
            file="config.json",
        )


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model; multimodal models nest it in `text_config`."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else dict(config)


def find_odd_sizes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence, without a full stop, for each value that no model can have."""
    for name in _MAPPINGS:
        if not isinstance(config.get(name), Mapping | None):
            yield f"{name} is {show(config[name])}; it must be an object"
    text = text_of(config)
    for name, limits in LIMITS.items():
        yield from _check_size(name, text.get(name), limits)
    for name in _FINITE:
        value = text.get(name)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            yield f"{name} is {value}; it must be a finite number"
    for name in _LISTS:
        if not isinstance(text.get(name), list | None):
            yield f"{name} is {show(text[name])}; it must be a list"
    yield from _check_padding(config)
    if not isinstance(text.get("model_type", ""), str):
        yield f"model_type is {show(text['model_type'])}; it must be a name"


def _check_padding(config: Mapping[str, Any]) -> Iterator[str]:
    own = config.get("text_config")
    own = own if isinstance(own, Mapping) else config
    padding, vocab = own.get("pad_token_id"), own.get("vocab_size")
    if type(padding) is int and type(vocab) is int and not -vocab <= padding < vocab:
        yield f"pad_token_id is {show(padding)}, and there are {vocab:,} tokens"


def _check_size(name: str, value: Any, limits: _Limits) -> Iterator[str]:
    # Some families have a list with one size per layer.
    for size in value if isinstance(value, list) and value else [value]:
        if size is None:  # the family's default
            continue
        if type(size) is not int:  # not isinstance: True is an int
            yield f"{name} is {show(size)}; it must be a whole number"
            return
        if not limits[0] <= size <= limits[1]:
            yield f"{name} is {show(size)}; it must be from {limits[0]:,} to {limits[1]:,}"
            return


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the quantization method of a model; empty: it is not quantized."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or not settings:
        return ""
    # Older configs of bitsandbytes lack the method.
    return str(settings.get("quant_method") or "bitsandbytes")


def is_4_bit(config: Mapping[str, Any]) -> bool:
    """Return whether bitsandbytes stores the linear layers in 4 bits, as a QLoRA run does."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or quantization_of(config) != "bitsandbytes":
        return False
    return bool(settings.get("load_in_4bit") or settings.get("_load_in_4bit"))


def _find_other_kind(config: Mapping[str, Any]) -> Iterator[ModelFinding]:
    names = [str(name) for name in config.get("architectures") or []]
    family = str(text_of(config).get("model_type", ""))
    why = ""
    if config.get("is_encoder_decoder"):
        why = "has an encoder and a decoder"
    elif family in _ENCODERS and not config.get("is_decoder"):
        why = "reads texts and writes none"
    elif names and not any(name.endswith(_ENDINGS) for name in names):
        why = f"is made for another task ({show(names[0])[1:-1]})"
    elif not names and not config.get("model_type"):
        why = "names no model_type"
    kind = str(config.get("model_type", ""))
    if not why and kind in NO_TEXT_CLASS:
        yield ModelFinding(
            kind="architecture",
            message=f"is made for pictures or sound in addition to text ({kind}), and Transformers "
            "does not load its language model alone",
            hint=OTHER_MODEL,
            file="config.json",
        )
    if why:
        message = f"is not a causal language model: it {why}"
        yield ModelFinding(
            kind="architecture", message=message, hint=OTHER_MODEL, file="config.json"
        )

"""Model families that the programs of each export format cannot handle.

Taken from the locked versions: llama.cpp's converter (`conversion.TEXT_MODEL_MAP`), gptqmodel's
`MODEL_MAP`, AutoAWQ's `AWQ_CAUSAL_LM_MODEL_MAP`. Only the listed families are refused; for others
the program itself reports what it cannot do. NF4 and the merge are made by Transformers and PEFT,
which handle every model that has been trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents.shared.models.config_findings import text_of
from agents.shared.models.families import name_family

_NO_GGUF = frozenset({"ministral"})
# Families with layers that gptqmodel neither knows nor detects.
_NO_GPTQMODEL = frozenset({"mamba2"})
# Families newer than AutoAWQ 0.2.9, which is archived, or with layers that it does not know.
_NO_AUTOAWQ = frozenset({
    "deepseek_v4", "falcon_h1", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4",
    "gemma4_text", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoehybrid", "lfm2", "llama4",
    "llama4_text", "mamba2", "ministral", "ministral3", "mistral3", "nemotron_h", "cohere2",
    "olmo2", "olmo3", "phi", "qwen2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "smollm3",
})  # fmt: skip

# True if llama.cpp always normalizes the weights of a token's experts to 1, False if it never does,
# regardless of the model's setting (`build_moe_ffn` in its src/models).
_GGUF_NORMS = {"qwen3_moe": True, "qwen3_next": True, "qwen2_moe": False, "olmoe": False}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def find_refusal(config: Mapping[str, Any], method: str, engine: str = "gptqmodel") -> str | None:
    """Return why a format cannot be made from a model's family, or None.

    Args:
        config: The model's config.json.
        method: Name of the format.
        engine: Package that makes AWQ.

    >>> find_refusal({"model_type": "ministral"}, "gguf")
    "gguf cannot be made of Ministral models: llama.cpp's converter does not know them"
    """
    family = str(text_of(config).get("model_type", ""))
    made = f"{method} cannot be made of {name_family(family).short} models"
    if method == "gguf" and family in _NO_GGUF:
        return f"{made}: llama.cpp's converter does not know them"
    # A model with the other setting would compute other weights after the conversion.
    norms = text_of(config).get("norm_topk_prob", _GGUF_NORMS.get(family))
    if method == "gguf" and family in _GGUF_NORMS and bool(norms) != _GGUF_NORMS[family]:
        return f"{made} whose norm_topk_prob is {norms}: llama.cpp computes them as if it were not"
    if method not in ("awq", "gptq"):
        return None
    if method == "awq" and engine == "autoawq" and family in _NO_AUTOAWQ:
        return f"{made} by AutoAWQ, which does not know them"
    if family in _NO_GPTQMODEL:
        return f"{made}: gptqmodel does not know their layers"
    return None


def find_left_wide(config: Mapping[str, Any], method: str) -> str | None:
    """Return the large part of a model that a format leaves in 16 bits, with the reason, or None.

    >>> find_left_wide({"model_type": "mixtral", "num_local_experts": 8}, "nf4")[:30]
    'The experts stay in 16 bits: T'
    """
    text = text_of(config)
    if method != "nf4" or not any(text.get(name) for name in _NUM_EXPERTS):
        return None
    return (
        "The experts stay in 16 bits: Transformers keeps those of a layer as one parameter, and "
        "bitsandbytes' files hold linear layers alone. GGUF quantizes experts."
    )


def suggest(method: str, engine: str) -> str:
    """Return an alternative to a refused format, as a hint."""
    if method == "awq" and engine == "autoawq":
        return "Let gptqmodel make it (--engine gptqmodel), or use nf4 or gguf"
    return "Use nf4, or the merged model" if method == "gguf" else "Use nf4 or gguf"

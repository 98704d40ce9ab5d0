"""Names of model families as used by their authors, by the `model_type` of their configs.

The only table of these names: plans, reasons and refusals read it, and docs/models.md is compared
with it. A family that is not listed is named by its `model_type`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FamilyName:
    """Name of a family, and its layers that a Llama lacks."""

    short: str
    """Name used by its authors."""
    kind: str = ""
    """Mixing of tokens, if it is not attention alone; empty: attention."""

    @property
    def full(self) -> str:
        """Name and kind, such as `Qwen3.5 (hybrid, linear attention)`."""
        return f"{self.short} ({self.kind})" if self.kind else self.short


_DELTA = "hybrid, linear attention"
_MAMBA = "hybrid, Mamba 2"
_LATENT = "latent attention"
NAMES: dict[str, FamilyName] = {
    "llama": FamilyName("Llama"),
    "llama4_text": FamilyName("Llama 4"),
    "mistral": FamilyName("Mistral"),
    "ministral": FamilyName("Ministral"),
    "ministral3": FamilyName("Ministral 3"),
    "mixtral": FamilyName("Mixtral"),
    "qwen2": FamilyName("Qwen1.5 to 2.5"),
    "qwen2_moe": FamilyName("Qwen2-MoE"),
    "qwen3": FamilyName("Qwen3"),
    "qwen3_moe": FamilyName("Qwen3-MoE"),
    "qwen3_next": FamilyName("Qwen3-Next", _DELTA),
    "qwen3_5_text": FamilyName("Qwen3.5", _DELTA),
    "qwen3_5_moe_text": FamilyName("Qwen3.5-MoE", _DELTA),
    "gemma": FamilyName("Gemma"),
    "gemma2": FamilyName("Gemma 2"),
    "gemma3_text": FamilyName("Gemma 3"),
    "gemma3n_text": FamilyName("Gemma 3n"),
    "gemma4_text": FamilyName("Gemma 4"),
    "phi": FamilyName("Phi 1, 2"),
    "phi3": FamilyName("Phi-3, Phi-4"),
    "cohere": FamilyName("Command R"),
    "cohere2": FamilyName("Command A"),
    "olmo2": FamilyName("OLMo 2"),
    "olmo3": FamilyName("OLMo 3"),
    "smollm3": FamilyName("SmolLM3"),
    "glm4": FamilyName("GLM-4"),
    "glm4_moe": FamilyName("GLM-4.5 to 4.7"),
    "gpt_oss": FamilyName("gpt-oss"),
    "granite": FamilyName("Granite"),
    "granitemoehybrid": FamilyName("Granite 4", _MAMBA),
    "deepseek_v2": FamilyName("DeepSeek-V2", _LATENT),
    "deepseek_v3": FamilyName("DeepSeek-V3", _LATENT),
    "falcon_h1": FamilyName("Falcon-H1", _MAMBA),
    "nemotron_h": FamilyName("Nemotron-H", _MAMBA),
    "lfm2": FamilyName("LFM2", "hybrid, short convolutions"),
    "mamba2": FamilyName("Mamba 2", "no attention"),
}
"""Names by the `model_type` of the text model."""


def name_family(model_type: str) -> FamilyName:
    """Return the name of a family, or its `model_type` if it is unknown.

    >>> name_family("qwen3_5_text").full, name_family("gpt_oss").full, name_family("new").full
    ('Qwen3.5 (hybrid, linear attention)', 'gpt-oss', 'new')
    """
    return NAMES.get(model_type) or FamilyName(model_type)

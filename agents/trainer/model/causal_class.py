"""Find the class of Transformers that loads language models.

`AutoModelForCausalLM` loads Gemma 3 with its vision tower, which no text passes through. Mistral 3
has the same structure but is not on its list, so it is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_ADDED = {"mistral3": "Mistral3ForConditionalGeneration"}


def find_causal_class() -> type[AutoModelForCausalLM]:
    """Return the class whose `from_pretrained` and `from_config` create a language model."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(_ADDED)
    return AutoModelForCausalLM


def name_public_class(config: Mapping[str, Any]) -> str:
    """Return the name of the class with which other programs load a model.

    >>> name_public_class({"model_type": "mistral3"}), name_public_class({"model_type": "gemma3"})
    ('AutoModelForImageTextToText', 'AutoModelForCausalLM')
    """
    is_added = config.get("model_type") in _ADDED
    return "AutoModelForImageTextToText" if is_added else "AutoModelForCausalLM"

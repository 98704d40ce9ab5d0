"""Find the class of Transformers that loads language models.

`AutoModelForCausalLM` loads Gemma 3 with its vision tower, through which no text goes. Mistral 3 is
built alike, but not on its list, so it is put there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_ADDED = {"mistral3": "Mistral3ForConditionalGeneration"}


def find_causal_class() -> type[AutoModelForCausalLM]:
    """Return the class whose `from_pretrained` and `from_config` make a language model."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(_ADDED)
    return AutoModelForCausalLM


def name_public_class(config: Mapping[str, Any]) -> str:
    """Return the name of the class by which a program that is not ours loads a model.

    >>> name_public_class({"model_type": "mistral3"}), name_public_class({"model_type": "gemma3"})
    ('AutoModelForImageTextToText', 'AutoModelForCausalLM')
    """
    is_added = config.get("model_type") in _ADDED
    return "AutoModelForImageTextToText" if is_added else "AutoModelForCausalLM"

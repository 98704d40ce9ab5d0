"""One thing that is wrong with a model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingKind = Literal[
    "config",  # config.json is missing, broken, or has sizes that no model has
    "architecture",  # it is no causal language model
    "adapter",  # the folder holds an adapter, or would load one
    "quantized",  # the weights are quantized
    "no_weights",  # there are no weights that are ever opened
    "weights",  # a file of weights is damaged
    "index",  # the list of shards is damaged
    "tensors",  # the weights are not those of the config
    "tokenizer",  # there is no tokenizer, or it is damaged
]
FILE_AGAIN = "Copy or download the file again"
OTHER_MODEL = "Name a causal language model, such as a folder of Llama, Qwen, Mistral or Gemma"
ORIGINAL = "Name the model that it was made from, in safetensors with 16 or 32 bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One thing that is wrong with a model's folder."""

    kind: FindingKind
    message: str
    """What is wrong, without a full stop, after the words `the model NAME`."""
    hint: str = ""
    """What to do next, without a full stop."""
    file: str = ""
    """Name of the file; empty: the folder as a whole."""

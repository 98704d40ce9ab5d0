"""Findings: what is wrong with a model's folder, and how a stranger's values are shown in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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


def show(value: Any) -> str:
    """Return a value of a config in at most 40 printable characters.

    >>> show("x" * 50), show(10**12), show(None)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", '1000000000000', 'None')
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = ascii(value[:200] if isinstance(value, str | list) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def printable(name: str) -> str:
    """Return a name of a stranger in at most 80 printable characters."""
    text = name[:200].encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."

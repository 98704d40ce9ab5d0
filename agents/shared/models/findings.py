"""Findings: faults of a model's folder, and how foreign values are shown in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FindingKind = Literal[
    "config",  # config.json is missing, broken, or has impossible sizes
    "architecture",  # it is not a causal language model
    "adapter",  # the folder holds an adapter, or would load one
    "quantized",  # the weights are quantized
    "no_weights",  # it has no weights in a supported format
    "weights",  # a file of weights is damaged
    "index",  # the list of shards is damaged
    "tensors",  # the weights do not match the config
    "tokenizer",  # the tokenizer is missing or damaged
]
FILE_AGAIN = "Copy or download the file again"
OTHER_MODEL = "Name a causal language model, such as a folder of Llama, Qwen, Mistral or Gemma"
ORIGINAL = "Name the model that it was made from, in safetensors with 16 or 32 bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One fault of a model's folder."""

    kind: FindingKind
    message: str
    """Fault, without a full stop, to follow the words `the model NAME`."""
    hint: str = ""
    """Advice, without a full stop."""
    file: str = ""
    """Name of the file; empty: the folder as a whole."""


def show(value: Any) -> str:
    """Return a value of a config in at most 40 printable characters.

    >>> show("x" * 50), show(10**12), show(None)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", '1000000000000', 'None')
    """
    # Python refuses to print numbers of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = ascii(value[:200] if isinstance(value, str | list) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def printable(name: str) -> str:
    """Return a foreign name in at most 80 printable characters."""
    text = name[:200].encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."

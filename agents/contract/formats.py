"""Formats that a run is exported to, their types and what makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Method = Literal["nf4", "awq", "gptq", "gguf"]


METHODS: tuple[Method, ...] = ("nf4", "awq", "gptq", "gguf")


Engine = Literal["gptqmodel", "autoawq"]


ENGINES: tuple[Engine, ...] = ("gptqmodel", "autoawq")
"""What can make AWQ; the first measures better and is maintained."""


FORMATS = ("merged", *METHODS)
"""What a run is exported to."""


TYPES: dict[str, tuple[str, ...]] = {
    "nf4": (),
    "awq": (),
    "gptq": ("4-bit", "8-bit"),
    "gguf": ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M"),
}
"""What may be chosen of each."""


USUAL_TYPES: dict[str, tuple[str, ...]] = {"gptq": ("4-bit",), "gguf": ("Q8_0",)}


CONVERTED_TYPES = ("F16", "Q8_0")
"""Of GGUF, that llama.cpp's converter writes itself; the others need a tool that is built first."""


GROUPS = (128, 64, 32)
"""Weights of AWQ and GPTQ that share a scale; the first that divides every layer's input."""


_SIZES = {"hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"}
"""That every transformer of our time has in its configuration; GPT-2 and Mamba have others."""


_AWQ_ROWS = 64
"""AWQ's search for clipping takes the outputs of a layer in blocks of so many."""


def choose_group(config: Mapping[str, Any], method: str) -> int:
    """Return the largest group that divides the inputs of all linear layers, for AWQ and GPTQ.

    >>> choose_group({"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 512,
    ...     "num_hidden_layers": 4}, "gptq")
    64

    Raises:
        ValueError: the method is not made of such a model; the sentence says why.
    """
    if not config.keys() >= _SIZES:
        raise ValueError(
            f"{method} is not made of this kind of model ({config.get('model_type')}), whose "
            "layers are built otherwise"
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads") or heads
    inputs = (hidden, heads * width, config["intermediate_size"])
    outputs = (hidden, heads * width, keys * width, config["intermediate_size"])
    groups = [group for group in GROUPS if all(size % group == 0 for size in inputs)]
    if not groups:
        raise ValueError(
            f"the layers of this model have {', '.join(map(str, sorted(set(inputs))))} inputs; "
            f"{method} needs multiples of {GROUPS[-1]}"
        )
    odd = [size for size in outputs if size % _AWQ_ROWS]
    if method == "awq" and odd:
        raise ValueError(
            f"a layer of this model has {odd[0]} outputs; awq needs multiples of {_AWQ_ROWS}"
        )
    return groups[0]

"""Refuse models whose layers gptqmodel divides, before an hour of work on them.

It makes two layers of `gate_up_proj` of Phi-3 and writes them as such: its AWQ crashes on it, and
no other program finds the weights of its GPTQ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from agents.errors import ExpectedError
from agents.trainer.model.causal_class import find_causal_class

_LAYERS = ".layers."


def refuse_divided(folder: Path, loaded: Any) -> None:
    """Refuse a model that gptqmodel has divided.

    Modules that Transformers itself names differently from the file, such as Mixtral's experts, are
    ignored.

    Args:
        folder: folder of the model.
        loaded: the model as loaded by gptqmodel.

    Raises:
        ExpectedError: gptqmodel has divided it.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Without memory: only the names of modules are compared.
    with torch.device("meta"):
        plain = find_causal_class().from_config(config, trust_remote_code=False)
    places = {_place_in_layer(name) for name, _ in plain.named_modules()}
    missing = places - {_place_in_layer(name) for name, _ in loaded.named_modules()}
    for path in sorted(folder.glob("*.safetensors")):
        for place in sorted(missing & _read_places(path)):
            raise ExpectedError(
                f"gptqmodel divides {place} of this kind of model; Transformers cannot load what "
                "it would make.",
                "Let AutoAWQ make awq (--engine autoawq), or use nf4 or gguf",
            )


def _read_places(path: Path) -> set[str]:
    """Return the modules with weights in the layers of a file."""
    with safe_open(path, framework="pt") as file:
        return {
            _place_in_layer(name.removesuffix(".weight"))
            for name in file.keys()  # noqa: SIM118 - no dictionary
            if name.endswith(".weight")
        }


def _place_in_layer(name: str) -> str:
    """Return the part of a name after the layer's number.

    >>> _place_in_layer("model.layers.12.mlp.gate_up_proj")
    'mlp.gate_up_proj'
    """
    return name.partition(_LAYERS)[2].partition(".")[2]

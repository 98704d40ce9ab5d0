"""Trained values of a run, parameter by parameter: updates of an adapter, or whole weights.

Each weight is merged in float32 and rounded to its own type once, a few rows or experts at a time.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import load_peft_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from agents.errors import ExpectedError
from agents.trainer.checkpoint.sharded_files import find_shards, read_shapes
from agents.trainer.checkpoint.state import ADAPTER_CONFIG, ADAPTER_FILE, FULL_STEM
from agents.trainer.model.experts import names_as_they_are

# Maximum number of weights merged at once; each needs three times four bytes.
_MAX_PART = 1 << 22
_PREFIX = "base_model.model."
_IN_ADAPTER = re.compile(r"\.lora_")

Update = Callable[[Tensor], None]
"""Function that changes a weight in place.

Raises:
    ExpectedError: the result is not finite.
"""


def read_adapter(model: Any, folder: Path) -> dict[str, Update]:
    """Return the update of each parameter that an adapter changes, by the parameter's name.

    Args:
        model: Base model, whose parameters may be on the meta device.
        folder: Checkpoint.
    """
    with names_as_they_are():
        adapted = load_adapter(copy.deepcopy(model), folder, low_cpu_mem_usage=True)
        # PEFT has moved the adapter to its base's meta device, and would do so again.
        layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer._move_adapter_to_device_of_base_layer = _stay
        weights = load_peft_weights(str(folder), device="cpu")
        set_peft_model_state_dict(adapted, weights, low_cpu_mem_usage=True)
    base: Any = adapted.get_base_model()
    updates: dict[str, Update] = {}
    for place, layer in base.named_modules():
        if isinstance(layer, LoraLayer):
            # An adapter on experts belongs to one parameter that holds all experts.
            name = getattr(layer, "parameter_name", "weight")
            owner = place.replace(".base_layer", "")
            updates[f"{owner}.{name}"] = _AdapterUpdate(place, layer)
    path = folder / ADAPTER_FILE
    for key in read_shapes([path]):
        if not _IN_ADAPTER.search(key):  # a whole matrix that was trained next to the adapter
            updates[key.removeprefix(_PREFIX)] = _Replacement(path, key)
    return updates


def find_rows(model: Any, folder: Path) -> int | None:
    """Return the number of tokens that a checkpoint has weights for; None: those of its base."""
    embeddings = model.get_input_embeddings().weight
    names = [name for name, one in model.named_parameters() if one is embeddings]
    shapes = read_shapes(find_shards(folder, FULL_STEM) or [folder / ADAPTER_FILE])
    for name in names:
        found = shapes.get(name, shapes.get(f"{_PREFIX}{name}"))
        if found is not None and found[0] != len(embeddings):
            return found[0]
    return None


def load_adapter(model: Any, folder: Path, **settings: Any) -> Any:
    """Return a model with the adapter of a checkpoint.

    Args:
        model: Base model, with as many tokens as the checkpoint.
        folder: Checkpoint.
        **settings: Arguments of PEFT.
    """
    config = LoraConfig.from_pretrained(folder)
    # Whole matrices are loaded into the base model's own: a copy would not stay tied.
    config.modules_to_save, config.ensure_weight_tying = None, False
    return PeftModel.from_pretrained(model, folder, config=config, **settings)


def tie_whole(adapter: Path) -> None:
    """Give an exported adapter each whole matrix under the names of all modules that share it.

    PEFT keeps a copy for each module, so it has to find each.
    """
    saved = json.loads((adapter / ADAPTER_CONFIG).read_bytes()).get("modules_to_save") or ()
    keys = [f"{_PREFIX}{name}.weight" for name in saved]
    shapes = read_shapes([adapter / ADAPTER_FILE])
    if all(key in shapes for key in keys):
        return
    tensors = load_file(adapter / ADAPTER_FILE)
    whole = next(tensors[key] for key in keys if key in shapes)
    tensors |= {key: whole.clone() for key in keys if key not in shapes}
    save_file(tensors, adapter / ADAPTER_FILE, metadata={"format": "pt"})


def _stay(*args: Any, **kwargs: Any) -> None:
    pass


def read_full(folder: Path) -> dict[str, Update]:
    """Return the trained value of each parameter, by its name, as an update that copies it."""
    updates: dict[str, Update] = {}
    for path in find_shards(folder, FULL_STEM):
        for name in read_shapes([path]):
            updates[name] = _Replacement(path, name)
    return updates


class _AdapterUpdate:
    def __init__(self, name: str, layer: Any) -> None:
        self._name = name
        self._layer = layer

    def __call__(self, weight: Tensor) -> None:
        layer = self._layer
        # GPT-2 stores weights with inputs first, but DoRA's lengths are those of outputs.
        rows = weight.T if layer.fan_in_fan_out else weight
        step = max(1, _MAX_PART * len(rows) // max(1, rows.numel()))
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            merged = part.float()
            for adapter in layer.active_adapters:
                merged = merged + self._find_delta(adapter, first, first + len(part))
                if adapter in layer.lora_magnitude_vector:
                    lengths = layer.lora_magnitude_vector[adapter].weight[first : first + step]
                    merged = _lengthen(merged, lengths.float())
            refuse_diverged(self._name, merged)
            part.copy_(merged)

    def _find_delta(self, adapter: str, first: int, end: int) -> Tensor:
        """Return the adapter's contribution to some rows (R, I), or to some experts (R, O, I).

        The layout of an adapter on experts is that of PEFT's `ParamWrapper.get_delta_weight`,
        which would round the sum of all experts to half precision.
        """
        layer = self._layer
        down = layer.lora_A[adapter].weight.float()
        up = layer.lora_B[adapter].weight.float()
        scale = layer.scaling[adapter]
        if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
            down_ERI = down.reshape(layer.num_experts, -1, down.shape[-1])[first:end]
            up_ORE = up.reshape(up.shape[0], -1, layer.num_experts)[..., first:end]
            is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            product = "ore,eri->eio" if is_transposed else "ore,eri->eoi"
            return torch.einsum(product, up_ORE, down_ERI) * scale
        return up[first:end] @ down * scale


class _Replacement:
    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def __call__(self, weight: Tensor) -> None:
        with safe_open(self._path, framework="pt") as file:
            value = file.get_tensor(self._name)
        refuse_diverged(self._name, value)
        weight.copy_(value)


def refuse_diverged(name: str, weight: Tensor) -> None:
    """Check that all numbers are finite.

    Raises:
        ExpectedError: a number is not finite.
    """
    if not weight.isfinite().all():
        raise ExpectedError(
            f"The merged weight of {name} holds numbers that are not finite.",
            "The training has diverged: export an earlier checkpoint",
        )


def _lengthen(rows_OI: Tensor, lengths_O: Tensor) -> Tensor:
    """Scale each output's weights to the length learned by DoRA (Liu et al. 2024, equation 5)."""
    return rows_OI * (lengths_O / torch.linalg.norm(rows_OI, dim=1))[:, None]

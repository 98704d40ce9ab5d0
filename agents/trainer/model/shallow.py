"""Compare two ways to compute a model by its first layers alone.

Two ways to compute the same attention differ in the last digits. Layers may magnify that: where
weights were never trained (64 layers of random weights in bf16 differ by more than a tenth of the
largest logit), and in a mixture of experts, where two experts are about as good for a token and the
last digits send it to the other one. After a few layers little has drifted apart. And of a model
whose layers come from a disk, a few are read instead of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.model.nf4_experts import find_routers

# Share of the tokens that must agree. Fewer would let one of the probe's two segments be wrong.
_LEAST_SHARE = 2 / 3


def has_routers(body: nn.Module) -> bool:
    """Return whether tokens of a model go to experts."""
    return next(find_routers(body), None) is not None


@contextmanager
def first_layers(body: Any, at_least: int) -> Iterator[None]:
    """Let the body of a model have only its first layers inside the block, each kind at least once.

    Nothing changes where the layers are not found.

    Args:
        body: The model without its head.
        at_least: Number of layers, if there are so many.
    """
    found = [
        (name, child)
        for name, child in body.named_children()
        if isinstance(child, nn.ModuleList)
        and child
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    if len(found) != 1:
        yield
        return
    ((name, layers),) = found
    setattr(body, name, layers[: max(at_least, count_kinds(layers, body.config))])
    try:
        yield
    finally:
        setattr(body, name, layers)


def count_kinds(layers: nn.ModuleList, config: Any) -> int:
    """Return after how many layers each kind of them has occurred.

    Layers are of one kind if they have the same modules with the same settings, and weights of the
    same shapes. A setting that differs between any two layers is a layer's name or number.
    """
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    described = [dict(_describe(layer)) for layer in layers]
    values: dict[tuple[str, str], set[Any]] = {}
    for one in described:
        for key, value in one.items():
            values.setdefault(key, set()).add(value)
    kinds = [
        (kind, tuple((key, value) for key, value in one.items() if len(values[key]) < len(layers)))
        for kind, one in zip(types, described, strict=False)
    ]
    return max((kinds.index(kind) for kind in set(kinds)), default=len(layers) - 1) + 1


def _describe(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield names and values of all that tells a layer from one of another kind."""
    for name, module in layer.named_modules():
        yield (name, "class"), type(module)
        for setting, value in vars(module).items():
            if value is None or isinstance(value, (bool, int, float, str)):
                yield (name, setting), value
        for parameter, tensor in module.named_parameters(recurse=False):
            yield (name, parameter), (tensor.shape, tensor.dtype)


def most_agree(error_M: Tensor, tolerance: float) -> bool:
    """Return whether the errors of most tokens are within the tolerance."""
    return bool((error_M <= tolerance).float().mean() >= _LEAST_SHARE)

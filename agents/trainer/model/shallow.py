"""Compare two computations of a model by its first layers alone.

Two computations of the same attention differ in the last digits. Layers may amplify that: with
untrained weights (64 layers of random weights in bf16 differ by more than a tenth of the largest
logit), and in a mixture of experts, where two experts may be about equally good for a token and the
last digits decide. After a few layers the difference is still small. And of a model on a disk, a
few layers are read instead of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.model.nf4_experts import find_routers

# Fraction of the tokens that must agree. A smaller one would miss an error in one of the two
# segments.
_LEAST_SHARE = 2 / 3


def has_routers(body: nn.Module) -> bool:
    """Return whether a model sends tokens to experts."""
    return next(find_routers(body), None) is not None


@contextmanager
def first_layers(body: Any, at_least: int) -> Iterator[None]:
    """Limit the body of a model to its first layers inside the block, with each kind at least once.

    Does nothing if the layers are not found.

    Args:
        body: model without its head.
        at_least: minimum number of layers, if the model has so many.
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
    """Return the number of first layers that contain every kind of layer.

    Layers are of one kind if they have the same modules with the same settings, and weights of the
    same shapes. A setting that differs between any two layers is a layer's name or number.
    """
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    described = [dict(_describe(layer)) for layer in layers]
    values: dict[tuple[str, str], set[Any]] = {}
    for settings in described:
        for key, value in settings.items():
            values.setdefault(key, set()).add(value)
    kinds = [
        (kind, tuple((k, value) for k, value in settings.items() if len(values[k]) < len(layers)))
        for kind, settings in zip(types, described, strict=False)
    ]
    return max((kinds.index(kind) for kind in set(kinds)), default=len(layers) - 1) + 1


def _describe(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield names and values of everything that distinguishes kinds of layers."""
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

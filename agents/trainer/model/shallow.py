"""Compare what a mixture of experts computes by its first layers alone.

Two ways to compute the same attention differ in the last digits. Where two experts are about as
good for a token, that is enough to send it to the other one, and layer by layer tokens drift apart,
although both ways are right. After a few layers most tokens have kept their experts.
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
def first_layers(body: Any) -> Iterator[None]:
    """Let the body of a model have only its first layers inside the block, each kind at least once.

    Nothing changes where the layers are not found.
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
    setattr(body, name, layers[: count_kinds(layers, body.config)])
    try:
        yield
    finally:
        setattr(body, name, layers)


def count_kinds(layers: nn.ModuleList, config: Any) -> int:
    """Return after how many layers each kind of them has occurred."""
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = [
        (kind, frozenset(type(module) for module in layer.modules()))
        for layer, kind in zip(layers, types, strict=False)
    ]
    return max((kinds.index(kind) for kind in set(kinds)), default=len(layers) - 1) + 1


def most_agree(error_M: Tensor, tolerance: float) -> bool:
    """Return whether the errors of most tokens are within the tolerance."""
    return bool((error_M <= tolerance).float().mean() >= _LEAST_SHARE)

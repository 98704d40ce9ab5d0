"""Choose the linear layers that get an adapter, by the targets of a run file.

PEFT matches targets with the full names of modules, so a target may select some decoder layers and
not others; such layers get different values of `number`. Full names here are those of a Llama. In a
model whose decoder is named otherwise, a target that spells out that name matches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from app.planning.shape.layer_shape import LayerShape, Linear

Targets = str | tuple[str, ...]
"""`all-linear`, a regular expression for full names, or endings of full names."""


def choose_targets(layer: LayerShape, targets: Targets) -> tuple[Linear, ...]:
    """Return the linear layers that get an adapter."""
    if targets == "all-linear":
        return tuple(linear for linear in layer.linears if linear.is_adapted)
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error:
            return ()  # the trainer reports an invalid expression
        return tuple(linear for linear in layer.linears if pattern.fullmatch(_name(layer, linear)))
    return tuple(
        linear
        for linear in layer.linears
        if linear.name in targets
        or any(f".{_name(layer, linear)}".endswith(f".{target}") for target in targets)
    )


def tell_layers_apart(layers: Sequence[LayerShape], targets: Targets) -> tuple[LayerShape, ...]:
    """Return layers such that one object stands only for layers with the same adapters.

    Args:
        layers: layers in the order of the model; equal ones are the same object.
        targets: targets of the adapter.
    """
    # Only expressions and dotted endings can distinguish layers.
    is_alike = targets == "all-linear" or (
        not isinstance(targets, str) and not any("." in target for target in targets)
    )
    if is_alike:
        return tuple(layers)
    known: dict[tuple[object, ...], LayerShape] = {}
    found = []
    for number, layer in enumerate(layers):
        chosen = choose_targets(replace(layer, number=number), targets)
        key = (id(layer), *(one.place for one in chosen))
        if key not in known:
            known[key] = layer if number == layer.number else replace(layer, number=number)
        found.append(known[key])
    return tuple(found)


def _name(layer: LayerShape, linear: Linear) -> str:
    return f"model.layers.{layer.number}.{linear.place}"

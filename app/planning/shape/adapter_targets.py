"""Which linear layers of a decoder layer get an adapter, by the targets of a run file.

PEFT matches targets with the full names of modules, so that they may mean some layers and not
others. The names here are those of a Llama; in a model whose decoder has another name, a target
that spells it is not found. Layers that targets distinguish are told apart by `number`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from app.planning.shape.layer_shape import LayerShape, Linear

Targets = str | tuple[str, ...]
"""`all-linear`, a regular expression for full names, or endings of full names."""


def choose_targets(layer: LayerShape, targets: Targets) -> tuple[Linear, ...]:
    """Return the linear layers that get an adapter.

    An expression that is invalid matches nothing here, and the trainer reports it.
    """
    if targets == "all-linear":
        return tuple(one for one in layer.linears if one.is_adapted)
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error:
            return ()
        return tuple(one for one in layer.linears if pattern.fullmatch(_name(layer, one)))
    return tuple(
        one
        for one in layer.linears
        if one.name in targets
        or any(f".{_name(layer, one)}".endswith(f".{target}") for target in targets)
    )


def tell_layers_apart(layers: Sequence[LayerShape], targets: Targets) -> tuple[LayerShape, ...]:
    """Return layers, of which those in which targets choose otherwise are no longer one object.

    Args:
        layers: in the order of the model; equal ones are the same object.
        targets: of the adapter.
    """
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

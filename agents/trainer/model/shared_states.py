"""Keys and values that several layers of a model share: Gemma 3n, Gemma 4.

Their classes pass one dictionary to all layers: some add their keys and values, later ones read
them. A layer that is compiled or recomputed must not write to its arguments: the compiler refuses
to repeat that, and a second forward pass would replace values that others have read. So `call`
turns the layer into a pure function: readable states are inputs, and written states are outputs, as
tensors whose gradients autograd sums over all readers.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

NAME = "shared_kv_states"
"""Argument of a layer that holds the dictionary."""

States = dict[Any, tuple[Tensor, ...]]
"""Shared tensors by the key of the class: a kind of layers, or the number of a layer."""


class _Overlay:
    """Stand-in for the dictionary in one call of one layer: reads from `given`, stores writes.

    Created and dropped within a call, which the compiler can trace.
    """

    def __init__(self, given: States) -> None:
        self._given = given
        self.written: States = {}

    def __getitem__(self, key: Any) -> tuple[Tensor, ...]:
        return self.written[key] if key in self.written else self._given[key]

    def __setitem__(self, key: Any, value: tuple[Tensor, ...]) -> None:
        self.written[key] = value


def take(kwargs: dict[str, Any]) -> tuple[dict[str, Any], MutableMapping[Any, Any] | None]:
    """Return a layer's arguments for `call`, and the dictionary for the states that it writes.

    The dictionary is None if the model's layers share no states.
    """
    shared = kwargs.get(NAME)
    if shared is None:
        return kwargs, None
    return {**kwargs, NAME: dict(shared)}, shared


def call(
    forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, States]:
    """Return a layer's output and the states that it writes; does not change its arguments."""
    given = kwargs.get(NAME)
    if given is None:
        return forward(hidden, *args, **kwargs), {}
    overlay = _Overlay(given)
    output = forward(hidden, *args, **{**kwargs, NAME: overlay})
    return output, overlay.written

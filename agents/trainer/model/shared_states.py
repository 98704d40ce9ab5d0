"""Keys and values that several layers of a model share: Gemma 3n, Gemma 4.

Their classes hand one dictionary to all layers: some add their keys and values to it, later ones
read them. A layer that is compiled or computed again must not write to what it is given: the
compiler refuses to repeat that, and a second forward pass would replace what others have read. So
`call` makes a function of it: what a layer may read goes in, and what it writes comes out, as
tensors whose gradients autograd sums over all readers.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

NAME = "shared_kv_states"
"""Argument of a layer that holds the dictionary."""

States = dict[Any, tuple[Tensor, ...]]
"""Shared tensors by what the class names them: a kind of layers, or the number of one."""


class _Overlay:
    """Stands for the dictionary in one call of one layer: reads from `given`, keeps what it gets.

    Made and dropped within a call, which the compiler can follow.
    """

    def __init__(self, given: States) -> None:
        self._given = given
        self.written: States = {}

    def __getitem__(self, key: Any) -> tuple[Tensor, ...]:
        return self.written[key] if key in self.written else self._given[key]

    def __setitem__(self, key: Any, value: tuple[Tensor, ...]) -> None:
        self.written[key] = value


def take(kwargs: dict[str, Any]) -> tuple[dict[str, Any], MutableMapping[Any, Any] | None]:
    """Return a layer's arguments for `call`, and the dictionary that gets what the layer writes.

    The dictionary is None if the model's layers share nothing.
    """
    shared = kwargs.get(NAME)
    if shared is None:
        return kwargs, None
    return {**kwargs, NAME: dict(shared)}, shared


def call(
    forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, States]:
    """Return a layer's output and the states that it writes; changes none of its arguments."""
    given = kwargs.get(NAME)
    if given is None:
        return forward(hidden, *args, **kwargs), {}
    overlay = _Overlay(given)
    found = forward(hidden, *args, **{**kwargs, NAME: overlay})
    return found, overlay.written

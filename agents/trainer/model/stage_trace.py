"""Trace how a model's class calls its layers, in one pass with recorders in their place.

A model can be cut if only one tensor passes from layer to layer. The class does not show that: some
compute their layers several times, some change features between two layers, some take the first of
several results.

Shape letters: M tokens of the flat row, H hidden features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agents.errors import ExpectedError
from agents.trainer.model.layer_loading import AbsentModule

_NUM_TOKENS = 5
_HINT = "Use parallel: streamed or data, where every rank computes all layers"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCalls:
    """Calls of its layers by a class."""

    width: int
    """Number of hidden features H between layers."""
    takes_first: bool
    """True if it takes the first of several results of a layer."""


class _Unfit(Exception):
    """Raised if the model cannot be cut; its text completes the sentence that says why."""


class _Watched(Tensor):
    """Features that record how they are used; torch treats them as an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    takes_first = False

    def __getitem__(self, index: Any) -> Tensor:
        self.takes_first = self.takes_first or index == 0
        plain = self.as_subclass(Tensor)
        return plain if self.takes_first else plain[index]

    def __iter__(self) -> Iterator[Tensor]:
        raise _Unfit("takes several results of each layer")


class _Recorder(AbsentModule):
    """Placeholder of a layer that records its calls."""

    def __init__(self, layer: nn.Module, place: int, calls: _Calls) -> None:
        super().__init__(layer)
        self._place, self._calls = place, calls

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the features (1, M, H) unchanged."""
        return self._calls.note(self._place, hidden)


class _Calls:
    """Records of the recorders of one pass."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.results: list[_Watched] = []

    def note(self, place: int, hidden: Any) -> Tensor:
        """Record a call with features (1, M, H), and return them."""
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise _Unfit("hands on more than one row of features from layer to layer")
        if self.results and not torch.equal(hidden, self.results[-1]):
            raise _Unfit("changes features between two layers")
        result = hidden.detach().clone().as_subclass(_Watched)
        self.places.append(place)
        self.results.append(result)
        return result


def trace_layers(causal: nn.Module, body: Any, names: Sequence[str], device: Any) -> LayerCalls:
    """Return how a class calls its layers.

    Args:
        causal: model, of which this rank may have only some layers.
        body: the model without its head.
        names: names of its layers, in order.
        device: device of the pass.

    Raises:
        ExpectedError: the model cannot be cut into stages.
    """
    calls = _Calls()
    ids_1M = torch.arange(3, 3 + _NUM_TOKENS, device=device)[None]
    try:
        with _recording(causal, names, calls), torch.no_grad():
            body(input_ids=ids_1M, use_cache=False)
        if calls.places != list(range(len(names))):
            raise _Unfit("does not compute each of its layers once, in their order")
    except (_Unfit, TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        known = isinstance(error, _Unfit)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = str(error) if known else f"needs its layers themselves ({lines[0][:150]})"
        raise ExpectedError(
            f"{type(causal).__name__} cannot be cut into stages, because it {why}.", _HINT
        ) from error
    return LayerCalls(
        width=calls.results[-1].shape[-1],
        takes_first=any(result.takes_first for result in calls.results),
    )


@contextmanager
def _recording(causal: nn.Module, names: Sequence[str], calls: _Calls) -> Iterator[None]:
    """Replace all layers by recorders inside the block."""
    layers = {name: causal.get_submodule(name) for name in names}
    for place, (name, layer) in enumerate(layers.items()):
        causal.set_submodule(name, _Recorder(layer, place, calls))
    try:
        yield
    finally:
        for name, layer in layers.items():
            causal.set_submodule(name, layer)

"""Connect the layers of one rank to the neighboring stages; see `stage_ends`.

A model can be cut if its layers pass on only one tensor. Other arguments of a layer's class must be
known here: per-layer inputs, or keys and values of other layers, would be lost. One pass
with recorders in place of the layers shows how the class calls them, which its code does not: some
classes compute their layers several times, some change features between two layers, some take the
first of several results.

Shape letters: M tokens of the flat row, H hidden features.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from agents.errors import ExpectedError
from agents.trainer.model.forward import find_body
from agents.trainer.model.layer_loading import AbsentModule, find_layers
from agents.trainer.model.model import TrainedModel
from agents.trainer.model.stage_ends import PassingLayer, StageEnds, UnfedEmbedding

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

    # Results of operations are plain tensors, so only the recorder's own output is watched.
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
        # Some classes pass several streams of features, which a message does not carry.
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
        # Lack of memory is not a property of the class.
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


# Arguments of layers that every rank has, or computes from the positions of its tokens.
KNOWN_ARGUMENTS = {
    *("self", "args", "kwargs", "hidden_states", "attention_mask", "causal_mask", "alibi"),
    *("mamba_attention_mask", "conv_mask"),
    *("position_ids", "position_embeddings", "cache_position", "head_mask", "use_cache"),
    *("past_key_values", "past_key_value", "layer_past", "cache_params", "output_attentions"),
    *("output_router_logits", "output_hidden_states", "layer_idx"),
    *("encoder_hidden_states", "encoder_attention_mask"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPlace:
    """A trained parameter that some rank holds."""

    shape: tuple[int, ...]
    layer: int
    """Index of its layer; the embedding counts to the first layer, the head to the last."""


def open_stage(model: TrainedModel, first: int, stop: int, device: torch.device) -> TrainedModel:
    """Return the model with its layers `first` to `stop` - 1 connected to the other stages.

    Args:
        model: model whose other layers are absent.
        first: index of its first layer.
        stop: index after its last layer.
        device: device of the model.

    Raises:
        ExpectedError: the model cannot be cut, or these layers have nothing to train.
    """
    causal = _find_causal(model)
    names = find_layers(causal)
    layers = [causal.get_submodule(name) for name in names]
    for layer in layers:
        if not isinstance(layer, AbsentModule):
            _refuse_connected(causal, layer)
    # The placeholder comes first: the traced pass needs an embedding that makes features.
    absent = causal.get_input_embeddings()
    embedding = None
    if isinstance(absent, AbsentModule):
        embedding = UnfedEmbedding(absent, model.dtype, device)
        causal.set_input_embeddings(embedding)
    calls = trace_layers(causal, find_body(causal), names, device)
    ends = StageEnds(first, stop, len(names), calls.width)
    if embedding is not None:
        embedding.ends = ends
    for place, (name, layer) in enumerate(zip(names, layers, strict=True)):
        if isinstance(layer, AbsentModule):
            enters = ends if place == first - 1 else None
            leaves = ends if place == stop else None
            standing = PassingLayer(layer, enters, leaves, in_tuple=calls.takes_first)
            causal.set_submodule(name, standing)
    opened = replace(model, stage=ends)
    if not opened.named_parameters():
        raise ExpectedError(
            f"Layers {first + 1} to {stop} of the model have nothing to train.",
            "Use adapter.targets: all-linear, or fewer nodes, so that every stage has an adapter",
        )
    _refuse_outside(opened, [*layers, causal.get_input_embeddings()])
    return opened


def place_trained(model: TrainedModel) -> dict[str, TrainedPlace]:
    """Return the trained parameters of this rank by name, in the model's own order."""
    causal = _find_causal(model)
    names = find_layers(causal)
    owners = {
        id(parameter): place
        for place, name in enumerate(names)
        for parameter in causal.get_submodule(name).parameters()
    }
    owners |= {id(parameter): 0 for parameter in causal.get_input_embeddings().parameters()}
    return {
        name: TrainedPlace(
            shape=tuple(parameter.shape), layer=owners.get(id(parameter), len(names) - 1)
        )
        for name, parameter in model.named_parameters()
    }


def _find_causal(model: TrainedModel) -> Any:
    module: Any = model.module
    return module if model.lora is None else module.get_base_model()


def _refuse_outside(model: TrainedModel, parts: Sequence[nn.Module]) -> None:
    """Check that every trained parameter belongs to a layer, the embedding or the head."""
    causal = _find_causal(model)
    head = causal.get_output_embeddings()
    known = {
        id(parameter)
        for part in (*parts, *([head] if head is not None else []))
        for parameter in part.parameters()
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            module = name.partition(".lora_")[0].removeprefix("base_model.model.")
            raise ExpectedError(
                f"The adapter has {module}, which is no part of a layer of "
                f"{type(causal).__name__}, so that no stage would train it alone.",
                "Name layers in adapter.targets, such as q_proj and v_proj, or use parallel: "
                "streamed or data",
            )


def _refuse_connected(causal: nn.Module, layer: nn.Module) -> None:
    """Check that only features connect the layers."""
    odd = inspect.signature(type(layer).forward).parameters.keys() - KNOWN_ARGUMENTS
    if odd:
        raise ExpectedError(
            f"{type(causal).__name__} cannot be cut into stages, because its layers take "
            f"{', '.join(sorted(odd))}, too.",
            "Use parallel: streamed or data, where every rank computes all layers",
        )

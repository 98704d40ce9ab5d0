"""Connect the layers of one rank to the stages before and behind it; see `stage_ends`.

A model can be cut where one tensor is all that its layers hand on. What else a layer's class takes
has to be known here: per-layer inputs, or keys and values of other layers, would stay behind.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _find_minimal_target_modules
from peft.utils.constants import MIN_TARGET_MODULES_FOR_OPTIMIZATION
from torch import nn

from agents.errors import ExpectedError
from agents.trainer.model.layer_loading import AbsentModule, find_layers
from agents.trainer.model.model import TrainedModel
from agents.trainer.model.stage_ends import BorderLayer, StageEnds, UnfedEmbedding

# Arguments of layers that every rank has, or makes of the positions of its tokens.
KNOWN_ARGUMENTS = {
    *("self", "args", "kwargs", "hidden_states", "attention_mask", "causal_mask", "alibi"),
    *("position_ids", "position_embeddings", "cache_position", "head_mask", "use_cache"),
    *("past_key_values", "past_key_value", "layer_past", "output_attentions"),
    *("output_router_logits", "output_hidden_states", "layer_idx"),
    *("encoder_hidden_states", "encoder_attention_mask"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPlace:
    """A trained parameter that some rank holds."""

    shape: tuple[int, ...]
    layer: int
    """Index of its layer; one of the embedding counts to the first, one of the head to the last."""


def open_stage(model: TrainedModel, first: int, stop: int) -> TrainedModel:
    """Return the model, of which this rank has the layers `first` to before `stop`, connected.

    Raises:
        ExpectedError: the model cannot be cut, or nothing in this stretch is trained.
    """
    causal = _find_causal(model)
    names = find_layers(causal)
    ends = StageEnds(first, stop, len(names))
    for place, name in enumerate(names):
        layer = causal.get_submodule(name)
        if not isinstance(layer, AbsentModule):
            _refuse_connected(causal, layer)
            continue
        enters = ends if place == first - 1 else None
        leaves = ends if place == stop else None
        if enters or leaves:
            above, _, last = name.rpartition(".")
            setattr(causal.get_submodule(above), last, BorderLayer(layer, enters, leaves))
    embedding = causal.get_input_embeddings()
    if isinstance(embedding, AbsentModule):
        causal.set_input_embeddings(UnfedEmbedding(ends, embedding, model.dtype))
    opened = replace(model, stage=ends)
    if not opened.named_parameters():
        raise ExpectedError(
            f"Layers {first + 1} to {stop} of the model have nothing to train.",
            "Use adapter.targets: all-linear, or fewer nodes, so that every stage has an adapter",
        )
    return opened


def place_trained(model: TrainedModel) -> dict[str, TrainedPlace]:
    """Return the trained parameters of this rank by name, in the model's own order."""
    causal = _find_causal(model)
    names = find_layers(causal)
    owners = {
        id(one): place
        for place, name in enumerate(names)
        for one in causal.get_submodule(name).parameters()
    }
    owners |= {id(one): 0 for one in causal.get_input_embeddings().parameters()}
    return {
        name: TrainedPlace(
            shape=tuple(parameter.shape), layer=owners.get(id(parameter), len(names) - 1)
        )
        for name, parameter in model.named_parameters()
    }


def list_modules(model: TrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of this rank's modules with an adapter, and those of all others."""
    names = [name for name, _ in _find_causal(model).named_modules() if name]
    adapted = [
        name for name in names if isinstance(_find_causal(model).get_submodule(name), LoraLayer)
    ]
    inside = tuple(f"{name}." for name in adapted)
    others = [name for name in names if name not in adapted and not name.startswith(inside)]
    return adapted, others


def name_targets(adapted: Collection[str], others: Collection[str]) -> set[str]:
    """Return the names by which PEFT describes an adapter of the whole model.

    Args:
        adapted: modules of all ranks with an adapter.
        others: modules of all ranks without one.

    >>> sorted(name_targets({f"layers.{n}.up" for n in range(20)}, {"layers", "head"}))
    ['up']
    """
    if len(adapted) < MIN_TARGET_MODULES_FOR_OPTIMIZATION:
        return set(adapted)
    return _find_minimal_target_modules(set(adapted), set(others))


def _find_causal(model: TrainedModel) -> Any:
    module: Any = model.module
    return module if model.lora is None else module.get_base_model()


def _refuse_connected(causal: nn.Module, layer: nn.Module) -> None:
    """Check that nothing but features connects the layers."""
    odd = inspect.signature(type(layer).forward).parameters.keys() - KNOWN_ARGUMENTS
    if odd:
        raise ExpectedError(
            f"{type(causal).__name__} cannot be cut into stages, because its layers take "
            f"{', '.join(sorted(odd))}, too.",
            "Use parallel: streamed or data, where every rank computes all layers",
        )

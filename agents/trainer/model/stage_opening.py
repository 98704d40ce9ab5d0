"""Connect the layers of one rank to the neighboring stages; see `stage_ends`.

A model can be cut if its layers pass on only one tensor. Other arguments of a layer's class must be
known here: per-layer inputs, or keys and values of other layers, would be lost. One pass shows how
the layers are called (`stage_trace`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from agents.errors import ExpectedError
from agents.trainer.model.forward import find_body
from agents.trainer.model.layer_loading import AbsentModule, find_layers
from agents.trainer.model.model import TrainedModel
from agents.trainer.model.stage_ends import PassingLayer, StageEnds, UnfedEmbedding
from agents.trainer.model.stage_trace import trace_layers

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

"""Load only the parts of a model that a rank holds.

Transformers still finds files, makes the class, maps names, converts, quantizes and ties. Between
the making of the class, whose parameters have no memory yet, and the reading of weights this module
asks which layers the rank holds. Parts that it lacks are replaced by an `AbsentModule`, so that
every other part keeps its name, and adapters and checkpoints with it; their tensors are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.model.file_tensors import group_by_parameter
from agents.trainer.model.layer_holdings import (
    ChooseLayers,
    LayerHoldings,
    ModelOutline,
    hold_everything,
)

# NF4 with double quantization: 4 bits, an 8-bit constant for each block of 64 weights, a 32-bit
# one for each 256 blocks (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


class AbsentModule(nn.Module):
    """Stands in for a part that other ranks hold, with its plain attributes; passes input on."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first input, such as the hidden features between two layers."""
        return hidden


def find_layers(model: Any) -> list[str]:
    """Return the names of a causal model's decoder layers in order; empty: it has no stack.

    The layers of a vision tower, which no text goes through, are not among them.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    stacks: list[list[str]] = []
    prefixes = {id(module): name for name, module in model.named_modules()}
    for module in (model if decoder is None else decoder).modules():
        if isinstance(module, nn.ModuleList) and len(module):
            kinds = (GradientCheckpointingLayer, AbsentModule)
            if all(isinstance(layer, kinds) for layer in module):
                name = prefixes[id(module)]
                stacks.append([f"{name}.{place}" for place in range(len(module))])
    return max(stacks, key=len, default=[])


@contextmanager
def loading_layers(choose: ChooseLayers = hold_everything) -> Iterator[None]:
    """Let `from_pretrained` load what `choose` names inside the block."""
    usual = PreTrainedModel._load_pretrained_model

    def load(model: Any, state: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
        layers = find_layers(model)
        holdings = choose(_outline(model, layers, config))
        if holdings.is_whole:
            return usual(model, state, files, config, *rest, **more)
        with _open(files) as opened:
            groups = group_by_parameter(model, opened, config.weight_mapping)
            absent = _find_absent(model, layers, holdings)
            _remove(model, absent)
            kept = _leave_out(groups, absent)
            names = [name for group in kept.values() for name in group]
            wanted = {name: opened[name].get_slice(name) for name in names}
            return usual(model, wanted, None, config, *rest, **more)

    PreTrainedModel._load_pretrained_model = staticmethod(load)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(usual)


def _outline(model: Any, layers: list[str], config: Any) -> ModelOutline:
    """Return what is known of a model whose parameters have no memory yet."""

    def count(module: nn.Module | None, name: str) -> int:
        parts = () if module is None else module.named_parameters()
        return sum(_count_bytes(model, f"{name}.{short}", one, config) for short, one in parts)

    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = bool(_find_tied(model, head))
    return ModelOutline(
        class_name=type(model).__name__,
        layer_bytes=tuple(count(model.get_submodule(name), name) for name in layers),
        embedding_bytes=count(embeddings, _name_of(model, embeddings)),
        head_bytes=0 if is_tied or head is None else count(head, _name_of(model, head)),
    )


def _count_bytes(model: Any, name: str, parameter: torch.Tensor, config: Any) -> int:
    quantizer = config.hf_quantizer
    if quantizer is not None and quantizer.param_needs_quantization(model, name):
        return math.ceil(parameter.numel() * _NF4_BYTES)
    dtype = config.dtype if parameter.is_floating_point() else parameter.dtype
    return int(parameter.numel() * dtype.itemsize)


def _find_absent(model: Any, layers: list[str], holdings: LayerHoldings) -> list[str]:
    """Return the names of the modules that the rank lacks."""
    absent = [layers[place] for place in holdings.find("absent")]
    head = model.get_output_embeddings()
    if not holdings.head and head is not None:
        absent.append(_name_of(model, head))
    if not holdings.embedding and not (holdings.head and _find_tied(model, head)):
        absent.append(_name_of(model, model.get_input_embeddings()))
    return absent


def _find_tied(model: Any, head: nn.Module | None) -> list[str]:
    """Return the parameters of the head that are those of another module."""
    name = "" if head is None else _name_of(model, head)
    return [one for one in model.all_tied_weights_keys if name and one.startswith(f"{name}.")]


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _remove(model: Any, absent: Iterable[str]) -> None:
    """Replace modules by stand-ins, and untie what was tied to them."""
    for name in absent:
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, AbsentModule(model.get_submodule(name)))
        model.all_tied_weights_keys = {
            target: source
            for target, source in model.all_tied_weights_keys.items()
            if not target.startswith(f"{name}.") and not source.startswith(f"{name}.")
        }


def _leave_out(groups: Mapping[str, list[str]], modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the groups of tensors of which no parameter is in one of these modules."""
    prefixes = tuple(f"{name}." for name in modules)
    return {target: names for target, names in groups.items() if not target.startswith(prefixes)}


@contextmanager
def _open(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Give the opened file of each tensor of safetensors files."""
    # Looked up here: `weights` may have put its reader in this place.
    open_file: Callable[..., Any] = modeling_utils.safe_open
    with ExitStack() as stack:
        opened = [stack.enter_context(open_file(path, framework="pt")) for path in paths]
        yield {name: file for file in opened for name in tuple(file.keys())}

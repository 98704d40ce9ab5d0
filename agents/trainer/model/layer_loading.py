"""Load only the parts of a model that a rank holds.

Transformers still finds files, creates the class, maps names, converts, quantizes and ties. After
the class is created, when its parameters have no memory yet, this module asks for the layers of the
rank. Missing parts are replaced by an `AbsentModule` and their tensors are not read, so every other
part keeps its name, and with it adapters and checkpoints. Streamed layers are loaded one at a time
and passed to a `LayerStore`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.model.file_tensors import group_by_parameter
from agents.trainer.model.layer_holdings import (
    ChooseLayers,
    LayerHoldings,
    ModelOutline,
    hold_everything,
)
from agents.trainer.model.nf4_experts import ExpertsNf4Quantizer

# NF4 with double quantization: 4 bits, an 8-bit constant for each block of 64 weights, a 32-bit one
# for each 256 blocks (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


class LayerStore(Protocol):
    """Storage of layers that are streamed to the device."""

    def begin(self, layer_bytes: Mapping[int, int]) -> None:
        """Prepare for layers of these sizes in bytes, by index."""

    def take_turns(self) -> Iterator[int]:
        """Yield each layer's index when it is to be restored, or else loaded and kept."""

    def restore(self, place: int, layer: nn.Module) -> bool:
        """Stream a layer with weights from an earlier run; return whether they exist."""

    def keep(self, place: int, layer: nn.Module) -> None:
        """Store the weights of a loaded layer, and stream it."""


OpenStore = Callable[[], LayerStore]
"""Called if there are layers to stream."""


class AbsentModule(nn.Module):
    """Placeholder of a part that other ranks hold, with its attributes; passes input on.

    Args:
        original: the part, whose parameters have no memory, or an earlier placeholder of it.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        whole = original.original if isinstance(original, AbsentModule) else original
        self._original = (whole,)  # not a child, whose parameters would be loaded

    @property
    def original(self) -> nn.Module:
        """The part itself, whose parameters have no memory."""
        return self._original[0]

    def __getattr__(self, name: str) -> Any:
        # Classes read attributes of their layers and embeddings, such as a layer's kind.
        return getattr(self._original[0], name)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first input, such as the hidden features between two layers."""
        return hidden


def find_layers(model: Any) -> list[str]:
    """Return the names of a causal model's decoder layers in order; empty without a stack.

    Layers of a vision tower are excluded, since no text passes through them.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    # A decoder may have several stacks; the layers of the model are the longest one.
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
def as_whole(model: nn.Module) -> Iterator[None]:
    """Restore all parts of a model inside the block, those of other ranks without memory.

    Decisions by names and classes of modules are then the same on every rank.
    """
    absent = {name: part for name, part in model.named_modules() if isinstance(part, AbsentModule)}
    for name, part in absent.items():
        model.set_submodule(name, part.original)
    try:
        yield
    finally:
        for name, part in absent.items():
            model.set_submodule(name, part)


@contextmanager
def loading_layers(
    choose: ChooseLayers = hold_everything, open_store: OpenStore | None = None
) -> Iterator[None]:
    """Let `from_pretrained` load only what `choose` returns inside the block.

    Args:
        choose: decides what the rank holds.
        open_store: returns the storage of streamed layers; None if no layer may be streamed.
    """
    usual = PreTrainedModel._load_pretrained_model

    def load(model: Any, state: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
        layers = find_layers(model)
        outline = _outline(model, layers, config)
        holdings = choose(outline)
        if holdings.is_whole:
            return usual(model, state, files, config, *rest, **more)
        with _open(files) as opened:
            groups = group_by_parameter(model, opened, config.weight_mapping)
            _remove(model, _find_absent(model, layers, holdings))
            streamed = {place: layers[place] for place in holdings.find("streamed")}
            kept = _leave_out(groups, [*_name_absent(model), *streamed.values()])
            slices = _slice(opened, kept)
            # Transformers would allocate GPU memory for the layers before it reads them.
            outer = _map_away(config, streamed.values())
            # Slices instead of files: only the listed tensors are read.
            found = usual(model, slices, None, outer, *rest, **more)
            if streamed:
                assert open_store is not None
                store = open_store()
                store.begin({place: outline.layer_bytes[place] for place in streamed})
                for place in store.take_turns():
                    name = streamed[place]
                    slices = _slice(opened, _only(groups, name))
                    _load_streamed(model, place, name, store, slices, config, found[0])
        return found

    PreTrainedModel._load_pretrained_model = staticmethod(load)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(usual)


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the compute type of 4-bit weights, regardless of the type in their file."""
    for part in module.modules():
        state = getattr(getattr(part, "weight", None), "quant_state", None)
        if type(part).__name__ == "Linear4bit" and state is not None:
            part.compute_dtype = state.dtype = dtype


def _load_streamed(
    model: Any, place: int, name: str, store: LayerStore, slices: Any, config: Any, found: Any
) -> None:
    """Pass a layer to the store, which streams it; its missing keys stay in `found`."""
    layer = model.get_submodule(name)
    own = {key for key in found.missing_keys if key.startswith(f"{name}.")}
    if not store.restore(place, layer):
        result, _ = convert_and_load_state_dict_in_model(model, slices, config)
        if isinstance(config.hf_quantizer, ExpertsNf4Quantizer):
            config.hf_quantizer.attach_packed(model)
        found.mismatched_keys |= result.mismatched_keys
        found.conversion_errors.update(result.conversion_errors)
        # Not whole: the missing keys are reported as those of the whole model.
        if own & result.missing_keys:
            found.missing_keys -= own - result.missing_keys
            return
        compute_in(layer, config.dtype)
        store.keep(place, layer)
    found.missing_keys -= own


def _map_away(config: Any, names: Iterable[str]) -> Any:
    """Return load settings that reserve no GPU memory for these modules."""
    if config.device_map is None:
        return config
    return replace(config, device_map={**config.device_map, **dict.fromkeys(names, "cpu")})


def _slice(opened: Mapping[str, Any], groups: Mapping[str, list[str]]) -> dict[str, Any]:
    names = [name for group in groups.values() for name in group]
    return {name: opened[name].get_slice(name) for name in names}


def _only(groups: Mapping[str, list[str]], module: str) -> dict[str, list[str]]:
    return {target: names for target, names in groups.items() if target.startswith(f"{module}.")}


def _name_absent(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, AbsentModule)]


def _outline(model: Any, layers: list[str], config: Any) -> ModelOutline:
    """Return the facts about a model whose parameters have no memory yet."""

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
        shared_weight=_find_shared(model, layers),
    )


def _find_shared(model: Any, layers: Iterable[str]) -> str:
    """Return a parameter that a layer shares with another one, or an empty name."""
    inside = tuple(f"{name}." for name in layers)
    tied = model.all_tied_weights_keys
    return next((name for name in tied if name.startswith(inside)), "")


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
    """Return the parameters of the head that are shared with another module."""
    name = "" if head is None else _name_of(model, head)
    return [key for key in model.all_tied_weights_keys if name and key.startswith(f"{name}.")]


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, part in model.named_modules() if part is module)


def _remove(model: Any, absent: Iterable[str]) -> None:
    """Replace modules by placeholders, and untie parameters that were tied to them."""
    for name in absent:
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, AbsentModule(model.get_submodule(name)))
        # Transformers would try to tie weights to a placeholder that has none.
        model.all_tied_weights_keys = {
            target: source
            for target, source in model.all_tied_weights_keys.items()
            if not target.startswith(f"{name}.") and not source.startswith(f"{name}.")
        }


def _leave_out(groups: Mapping[str, list[str]], modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the groups of tensors whose parameter is not in these modules."""
    prefixes = tuple(f"{name}." for name in modules)
    return {target: names for target, names in groups.items() if not target.startswith(prefixes)}


@contextmanager
def _open(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the opened file of each tensor of safetensors files."""
    # Looked up here, since `weights` may have replaced it with its own reader.
    open_file: Callable[..., Any] = modeling_utils.safe_open
    with ExitStack() as stack:
        opened = [stack.enter_context(open_file(path, framework="pt")) for path in paths]
        yield {name: file for file in opened for name in tuple(file.keys())}

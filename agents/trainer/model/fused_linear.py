"""Fuse linear layers that read the same input, together with their adapters.

Queries, keys and values are three products of one input; gate and up are two. Layers that share an
input are detected on a few tokens, so this works for any model class. Layers keep their parameters;
only `forward` changes: the first layer of a set computes all outputs, and the others return theirs.
`fused_linear_op` explains why this is faster.

Shape letters: M tokens, I inputs, O outputs of one layer, R ranks of all adapters of a set, Q of
one adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.kernels import nf4
from agents.trainer.kernels.fused_linear_op import multiply
from agents.trainer.kernels.masked_linear_op import multiply_masked
from agents.trainer.model import dora
from agents.trainer.streaming.layer_stream import LayerStream

# Number of adapters copied per call: their scaled intermediates take memory.
_LAYERS_TOGETHER = 16
# Ranks are padded to a multiple of this: 8 half-precision values are one 16-byte access.
_RANKS_TOGETHER = 8


class FusedSet:
    """Linear layers that share their input.

    Args:
        layers: modules in the order of their calls: LoRA layers or plain linear ones.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        # Input of the `_outputs`.
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def compute(self, place: int, x: Tensor) -> Tensor:
        """Return the output (..., O) of one layer for x (..., I)."""
        # Compared by identity: `x` is the tensor that the first layer got. The last layer drops the
        # outputs, so that no output outlives the set's turn.
        last = len(self._layers) - 1
        if place and x is self._input:
            output = self._outputs[place]
            if place == last:
                self._input, self._outputs = None, []
            return output
        if place or not last:
            return _compute([self._layers[place]], x)[0]
        self._input, self._outputs = x, _compute(self._layers, x)
        return self._outputs[0]


def _compute(layers: list[Any], x: Tensor) -> list[Tensor]:
    masked = [_mask(layer, x) for layer in layers]
    if any(part is not x for part in masked):
        return [_compute_masked(layer, x, part) for layer, part in zip(layers, masked, strict=True)]
    bases = [_base(layer) for layer in layers]
    is_packed = nf4.is_registered(bases[0])
    dtype = _compute_dtype(bases[0])
    x_MI = x.to(dtype).flatten(0, -2)
    adapted = [layer for layer in layers if _is_active(layer)]
    low_MR, down_RI = _project_down(adapted, x, x_MI)
    trained = [layer.lora_A["default"].weight for layer in adapted] if down_RI is not None else []
    trained += [layer.lora_B["default"].weight for layer in adapted]
    ups = [layer.fused_up for layer in adapted]
    weights = [nf4.get_handle(base) if is_packed else base.weight for base in bases]
    sizes = [bases[0].in_features]
    for layer, base in zip(layers, bases, strict=True):
        sizes += [base.out_features, len(layer.fused_down) if _is_active(layer) else 0]
    scale = adapted[0].scaling["default"] if adapted else 1.0
    products = multiply(x_MI, low_MR, down_RI, ups, trained, weights, sizes, scale)
    outputs = []
    for layer, y_MO in zip(layers, products, strict=True):
        scaled_MO = dora.apply(layer, y_MO) if _is_decomposed(layer) else y_MO
        outputs.append(_finish(layer, scaled_MO, x))
    return outputs


def _mask(layer: Any, x: Tensor) -> Tensor:
    """Return the input of a DoRA layer after dropout, or `x` itself without dropout."""
    return layer.lora_dropout["default"](x) if _is_decomposed(layer) else x


def _is_decomposed(layer: Any) -> bool:
    return _is_active(layer) and layer.fused_is_decomposed


def _compute_masked(layer: Any, x: Tensor, masked: Tensor) -> Tensor:
    """Return the output of a layer whose base weights see two inputs: DoRA with dropout."""
    if masked is x:
        return _compute([layer], x)[0]
    base = _base(layer)
    dtype = _compute_dtype(base)
    removed_MI, masked_MI = (part.to(dtype).flatten(0, -2) for part in (x - masked, masked))
    down_QI = layer.lora_A["default"].weight.to(dtype)
    low_MQ = F.pad(masked_MI @ down_QI.T, (0, len(layer.fused_down) - len(down_QI)))
    weight = nf4.get_handle(base) if nf4.is_registered(base) else base.weight
    removed_MO, y_MO = multiply_masked(
        removed_MI, masked_MI, low_MQ, layer.fused_up, layer.lora_B["default"].weight, weight,
        [base.in_features, base.out_features], float(layer.scaling["default"]),
    )  # fmt: skip
    return _finish(layer, dora.apply(layer, y_MO, removed_MO), x)


def _finish(layer: Any, y_MO: Tensor, x: Tensor) -> Tensor:
    """Return a layer's output (..., O) for x (..., I): with its bias, in the type of its class."""
    base = _base(layer)
    whole_MO = y_MO if base.bias is None else y_MO + base.bias.to(y_MO.dtype)
    y = whole_MO.reshape(*x.shape[:-1], base.out_features)
    return y.to(x.dtype) if nf4.is_registered(base) else y


def _project_down(
    adapted: list[Any], x: Tensor, x_MI: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the outputs of the down projections (M, R), and the projections (R, I).

    The projections are None with dropout, since each adapter then has its own masked input.
    """
    if not adapted:
        return None, None
    dropouts = [layer.lora_dropout["default"] for layer in adapted]
    if all(isinstance(dropout, nn.Identity) for dropout in dropouts):
        is_single = len(adapted) == 1  # otherwise all layers of the set
        down_RI = adapted[0].fused_down if is_single else adapted[0].fused_downs
        return x_MI.detach() @ down_RI.T, down_RI
    lows = []
    for layer, dropout in zip(adapted, dropouts, strict=True):
        down_QI = layer.lora_A["default"].weight.to(x_MI.dtype)
        padding = len(layer.fused_down) - len(down_QI)
        low_MQ = dropout(x).to(x_MI.dtype).flatten(0, -2) @ down_QI.T
        lows.append(F.pad(low_MQ, (0, padding)) if padding else low_MQ)
    return (torch.cat(lows, dim=1) if len(lows) > 1 else lows[0]), None


def _compute_dtype(base: Any) -> torch.dtype:
    dtype: torch.dtype = base.nf4_dtype if nf4.is_registered(base) else base.weight.dtype
    return dtype


def _read_weight(base: Any) -> Tensor:
    """Return the weight (O, I) of a linear layer, dequantized if necessary."""
    if nf4.is_registered(base):
        return nf4.read_weights(nf4.get_handle(base))
    weight_OI: Tensor = base.weight.detach()
    return weight_OI


def _base(layer: Any) -> Any:
    return layer.base_layer if isinstance(layer, LoraLayer) else layer


def _is_active(layer: Any) -> bool:
    return isinstance(layer, LoraLayer) and not layer.disable_adapters


class _FusedLinear:
    """Mixin that precedes the class of a linear layer in a set."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the layer's output for x (..., I)."""
        return self.fused_set.compute(self.fused_index, x)


class FusedCopies:
    """Copies of the adapters in the compute type of the base layers, refreshed once per step.

    Args:
        layers: layers that `fuse` has changed.
        stream: source of streamed base weights; None if no layer is streamed.
    """

    def __init__(self, layers: Sequence[Any], stream: LayerStream | None = None) -> None:
        adapted = [layer for layer in layers if isinstance(layer, LoraLayer)]
        self._stream = stream
        places = {
            module: place
            for place, block in (stream.modules if stream is not None else {}).items()
            for module in block.modules()
        }
        # Layers with magnitudes, by their streamed decoder layer; None for resident weights.
        self._decomposed: dict[int | None, list[Any]] = {}
        for layer in adapted:
            if layer.fused_is_decomposed:
                self._decomposed.setdefault(places.get(layer), []).append(layer)
        self._downs = [(a.lora_A["default"].weight, a.fused_down) for a in adapted]
        self._ups = [(a.lora_B["default"].weight, a.fused_up) for a in adapted]
        self._scales = [float(a.scaling["default"]) for a in adapted]

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def refresh(self) -> None:
        """Copy the current values of the parameters.

        Lengths that need streamed weights follow when these arrive for the next forward pass.
        """
        for start in range(0, len(self._ups), _LAYERS_TOGETHER):
            some = slice(start, start + _LAYERS_TOGETHER)
            # A few kernels for many small tensors, where one kernel each would be bound by
            # launches.
            scaled = torch._foreach_mul([up for up, _ in self._ups[some]], self._scales[some])
            downs = [down for down, _ in self._downs[some]]
            into = [copy[:, : up.shape[1]] for up, copy in self._ups[some]]
            into += [copy[: len(down)] for down, copy in self._downs[some]]
            torch._foreach_copy_(into, [*scaled, *downs])
        for place, layers in self._decomposed.items():
            if place is None or self._stream is None:
                _refresh_lengths(layers)
            else:
                self._stream.do_when_there(place, partial(_refresh_lengths, layers))


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def _refresh_lengths(layers: Sequence[Any]) -> None:
    # Inside a pass autocast would round sums that need fp32.
    with torch.autocast(layers[0].fused_up.device.type, enabled=False):
        for layer in layers:
            dora.refresh_lengths(layer, _read_weight(_base(layer)))


def collect_copies(model: nn.Module, stream: LayerStream | None = None) -> FusedCopies:
    """Return the copies of all adapters of a model that `fuse` has changed.

    Args:
        model: the model.
        stream: source of streamed layers; None if no layer is streamed.
    """
    fused = [module for module in model.modules() if isinstance(module, _FusedLinear)]
    return FusedCopies(fused, stream)


def fuse(
    model: nn.Module, run_once: Callable[[], object], stream: LayerStream | None = None
) -> None:
    """Fuse the linear layers of the decoder layers that share their input.

    Args:
        model: model whose 4-bit layers `nf4.register` has prepared.
        run_once: passes a few tokens through the whole model, once.
        stream: source of streamed layers; None if no layer is streamed.
    """
    adapted = {id(_base(module)) for module in model.modules() if isinstance(module, LoraLayer)}
    for layers in _find(model, run_once):
        fused_set = FusedSet(layers)
        _make_copies([layer for layer in layers if isinstance(layer, LoraLayer)])
        for place, layer in enumerate(layers):
            layer.fused_set, layer.fused_index = fused_set, place
            # Changing the class keeps parameters, hooks and `state_dict` names unchanged.
            layer.__class__ = _subclass(type(layer))
            if nf4.is_registered(_base(layer)):
                is_whole = isinstance(layer, LoraLayer) or id(layer) not in adapted
                nf4.set_sole_reader(_base(layer), is_alone=is_whole)
    collect_copies(model, stream).refresh()


def _make_copies(adapted: list[Any]) -> None:
    """Allocate the adapters' copies; the down projections of a set are views of one tensor."""
    if not adapted:
        return
    base = _base(adapted[0])
    kind: dict[str, Any] = {"dtype": _compute_dtype(base), "device": base.weight.device}
    ranks = [-(-layer.r["default"] // _RANKS_TOGETHER) * _RANKS_TOGETHER for layer in adapted]
    downs_RI = torch.zeros(sum(ranks), base.in_features, **kind)
    adapted[0].register_buffer("fused_downs", downs_RI, persistent=False)
    start = 0
    for layer, rank in zip(adapted, ranks, strict=True):
        down_QI = downs_RI[start : start + rank]
        up_OQ = torch.zeros(_base(layer).out_features, rank, **kind)
        layer.register_buffer("fused_down", down_QI, persistent=False)
        layer.register_buffer("fused_up", up_OQ, persistent=False)
        layer.fused_is_decomposed = dora.is_decomposed(layer)
        if layer.fused_is_decomposed:
            dora.make_buffers(layer)
        start += rank


def unfuse(model: nn.Module) -> None:
    """Restore the original `forward` of every layer."""
    for module in model.modules():
        if isinstance(module, _FusedLinear):
            module.__class__ = type(module).__bases__[1]
            if nf4.is_registered(_base(module)):
                nf4.set_sole_reader(_base(module), is_alone=False)


def _find(model: nn.Module, run_once: Callable[[], object]) -> Iterator[list[Any]]:
    """Yield sets of linear layers that can be fused, grouped by input."""
    calls: list[tuple[nn.Module, Tensor]] = []
    layers = [
        layer
        for block in model.modules()
        if isinstance(block, GradientCheckpointingLayer)
        for layer in _candidates(block)
    ]
    with torch.no_grad(), _recording_inputs(layers, calls):
        run_once()
    # A layer called more than once per pass has no fixed place in a set.
    once = [call for call in calls if sum(other is call[0] for other, _ in calls) == 1]
    sets: dict[object, list[Any]] = {}
    for layer, x in once:
        base: Any = _base(layer)
        kind = nf4.is_registered(base), _compute_dtype(base)
        # The version distinguishes a tensor that was changed in place between two layers.
        sets.setdefault((id(x), x._version, kind), []).append(layer)
    yield from sets.values()
    seen = {id(layer) for layer, _ in once}
    yield from ([layer] for layer in layers if id(layer) not in seen)


def _candidates(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers of a decoder layer, with their adapter if that is LoRA or DoRA."""
    inside: set[int] = set()
    for module in block.modules():
        if isinstance(module, LoraLayer) and isinstance(module, nn.Module) and _is_plain(module):
            inside.add(id(_base(module)))
            yield module
        elif id(module) not in inside and _is_linear(module):
            yield module


def _is_linear(module: Any) -> bool:
    if nf4.is_registered(module):
        return True
    return type(module) is nn.Linear and not module.weight.requires_grad


def _is_plain(layer: Any) -> bool:
    """Return whether an adapter is plain LoRA (Hu et al. 2021, arXiv:2106.09685) or DoRA."""
    return (
        list(layer.lora_A) == ["default"]
        and (not layer.lora_variant or dora.is_decomposed(layer))
        and not layer.merged
        and type(layer.lora_A["default"]) is nn.Linear
        and layer.lora_B["default"].bias is None
        and _is_linear(_base(layer))
    )


@contextmanager
def _recording_inputs(
    layers: list[nn.Module], calls: list[tuple[nn.Module, Tensor]]
) -> Iterator[None]:
    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))  # keeps the tensor alive, so that its id stays unique

    handles = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_subclasses: dict[type, type] = {}


def _subclass(kind: type) -> type:
    if kind not in _subclasses:
        _subclasses[kind] = type(kind.__name__, (_FusedLinear, kind), {})
    return _subclasses[kind]

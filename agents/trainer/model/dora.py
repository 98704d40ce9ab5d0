"""Magnitudes of weight-decomposed adapters (DoRA, Liu et al. 2024, arXiv:2402.09353).

An output of such a layer is that of LoRA times its row's trained magnitude m, divided by the length
of the row of W + U D, where D and U are the adapter's down projection and its scaled up projection.
The length gets no gradient (section 4.3). PEFT computes W + U D in every pass. Here the lengths are
computed once per step, since adapters change once per step, from the lengths of the rows of W, one
product with W and small ones. A streamed W is used when it arrives for the step's first forward
pass.

    |W + U D|^2 = |W|^2 + 2 (W D^T) . U + (U (D D^T)) . U    for each row, "." summing over ranks

Shape letters: M tokens, I inputs, O outputs of one layer, Q rank of its adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from agents.trainer.streaming.layer_stream import LayerStream

_NAME = "default"


def is_decomposed(layer: Any) -> bool:
    """Return whether a LoRA layer has magnitudes."""
    return isinstance(layer.lora_variant.get(_NAME), DoraLinearVariant)


def measure_magnitudes(model: nn.Module, stream: LayerStream | None = None) -> None:
    """Set all magnitudes to the lengths of the base weights' rows, their initial value.

    Lengths of training and merging are not rounded.

    Args:
        model: model with an adapter.
        stream: source of the streamed layers; None if no layer is streamed.

    Raises:
        ExpectedError: a streamed layer cannot be read.
    """
    # Not PEFT's own values: it rounds them to the type of the weights, which changes every output
    # by up to 0.4 % before the first step, and reads arbitrary slot content as weights of streamed
    # layers.
    waiting = {layer: None for layer in model.modules() if _has_magnitudes(layer)}
    if not waiting:
        return
    for block in stream.visit() if stream is not None else ():
        inside = [layer for layer in block.modules() if layer in waiting]
        _measure_magnitudes(inside)
        for layer in inside:
            del waiting[layer]
    _measure_magnitudes(waiting)


def _has_magnitudes(layer: nn.Module) -> bool:
    return isinstance(layer, LoraLayer) and is_decomposed(layer)


def _measure_magnitudes(layers: Iterable[Any]) -> None:
    for layer in layers:
        weight = dequantize_module_weight(layer.get_base_layer()).detach()
        weight_OI = weight.T if getattr(layer, "fan_in_fan_out", False) else weight
        magnitude: nn.Parameter = layer.lora_magnitude_vector[_NAME].weight
        magnitude.data = _measure_rows(weight_OI).to(magnitude.device)


def make_buffers(layer: Any) -> None:
    """Add the buffers of `refresh_lengths` to a layer.

    Args:
        layer: LoRA layer with copies of its adapter, `fused_down` (Q, I) and `fused_up` (O, Q).
    """
    up_OQ = layer.fused_up
    lengths_O = up_OQ.new_empty(len(up_OQ), dtype=_widen(up_OQ.dtype))
    layer.register_buffer("fused_lengths", lengths_O, persistent=False)
    # Filled later: the base weight is constant, but may not have arrived yet.
    layer.register_buffer("fused_squares", None, persistent=False)


def refresh_lengths(layer: Any, weight_OI: Tensor) -> None:
    """Compute the lengths of the rows of W + U D from the copies of the adapter."""
    down_QI, up_OQ = layer.fused_down, layer.fused_up
    wide = layer.fused_lengths.dtype
    if layer.fused_squares is None:
        layer.fused_squares = _measure_rows(weight_OI).square()
    crossed_OQ = _multiply_wide(weight_OI, down_QI.T, wide)
    squared_QQ = _multiply_wide(down_QI, down_QI.T, wide)
    up_OQ = up_OQ.to(wide)
    added_O = ((2 * crossed_OQ + up_OQ @ squared_QQ) * up_OQ).sum(1)
    # Rounding must not make a square negative.
    squares_O = (layer.fused_squares + added_O).clamp_min(torch.finfo(wide).tiny)
    torch.sqrt(squares_O, out=layer.fused_lengths)


def apply(layer: Any, y_MO: Tensor, plain_MO: Tensor | None = None) -> Tensor:
    """Return the outputs of a layer without its bias (M, O).

    Args:
        layer: the LoRA layer.
        y_MO: W x + U D x; of the masked x with dropout.
        plain_MO: with dropout, W times the part that the mask removes. As in PEFT, the base layer
            sees its whole input, and the magnitudes' change only the masked input.
    """
    factor_O = layer.lora_magnitude_vector[_NAME].weight / layer.fused_lengths
    scaled_MO = y_MO * factor_O
    if plain_MO is not None:
        scaled_MO = scaled_MO + plain_MO
    return scaled_MO.to(y_MO.dtype)


def _measure_rows(weight_OI: Tensor) -> Tensor:
    """Return the length of each row (O,), in fp32 at least."""
    return torch.linalg.vector_norm(weight_OI, dim=1, dtype=_widen(weight_OI.dtype))


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _multiply_wide(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return a @ b, accumulated and returned in a wider type than that of a and b."""
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)

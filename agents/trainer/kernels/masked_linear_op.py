"""A linear layer with two inputs, for DoRA with dropout, as one custom operator.

Weights are dequantized once for both products. The results are separate tensors: the gradient of
DoRA's magnitudes needs only one of them, and views of a single product would keep both.

Shape letters: M tokens, I inputs, O outputs, Q rank of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agents.trainer.kernels.fused_linear_op import multiply_wide, read_weight
from agents.trainer.kernels.operators import operator, set_gradient, shapes_of


@operator("masked_linear")
def multiply_masked(
    removed_MI: Tensor,
    masked_MI: Tensor,
    low_MQ: Tensor,
    up_OQ: Tensor,
    trained: Tensor,
    weight: Tensor,
    sizes: list[int],
    scale: float,
) -> list[Tensor]:
    """Return removed @ W.T (M, O) and masked @ W.T + low @ up.T (M, O).

    Opaque to the compiler for the same reason as `fused_linear_op.multiply`.

    Args:
        removed_MI: part of the input that dropout removes.
        masked_MI: part of the input that dropout keeps.
        low_MQ: output of the adapter's down projection.
        up_OQ: up projection.
        trained: parameter whose copy is `up_OQ`; it receives the gradient.
        weight: weight (O, I), or its NF4 handle; see `nf4.get_handle`.
        sizes: I and O.
        scale: factor that `up_OQ` already contains.
    """
    # Dequantized once for both products.
    weight_IO = read_weight(weight).T
    return [removed_MI @ weight_IO, (low_MQ @ up_OQ.T).addmm_(masked_MI, weight_IO)]


@shapes_of(multiply_masked)
def _multiply_shape(removed_MI: Tensor, *others: Any) -> list[Tensor]:
    shape = (removed_MI.shape[0], others[-2][1])
    return [removed_MI.new_empty(shape), removed_MI.new_empty(shape)]


@operator("masked_linear_backward")
def _multiply_backward(
    gradients: list[Tensor],
    low_MQ: Tensor,
    up_OQ: Tensor,
    weight: Tensor,
    sizes: list[int],
    scale: float,
    dtype: torch.dtype,
    wants_input: bool,
) -> list[Tensor]:
    """Return the gradients of `low`, `up` in type `dtype`, and of both inputs if requested."""
    of_removed_MO, of_masked_MO = gradients
    scaled_MQ = low_MQ if scale == 1.0 else low_MQ * scale
    results = [of_masked_MO @ up_OQ, multiply_wide(of_masked_MO.T, scaled_MQ, dtype)]
    if wants_input:
        weight_OI = read_weight(weight)
        results += [of_removed_MO @ weight_OI, of_masked_MO @ weight_OI]
    return results


@shapes_of(_multiply_backward)
def _multiply_backward_shape(
    gradients: list[Tensor],
    low_MQ: Tensor,
    up_OQ: Tensor,
    weight: Tensor,
    sizes: list[int],
    scale: float,
    dtype: torch.dtype,
    wants_input: bool,
) -> list[Tensor]:
    shape = (gradients[0].shape[0], sizes[0])
    inputs = [gradients[0].new_empty(shape) for _ in range(2 if wants_input else 0)]
    return [torch.empty_like(low_MQ), torch.empty_like(up_OQ, dtype=dtype), *inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, low_MQ, up_OQ, trained, weight, ctx.sizes, ctx.scale = inputs
    ctx.rank, ctx.dtype = trained.shape[1], trained.dtype
    ctx.save_for_backward(low_MQ, up_OQ, weight)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a layer that recomputes returns them only once
    wants_input = any(ctx.needs_input_grad[:2])  # False in the first layer
    of_low_MQ, of_up_OQ, *of_inputs = _multiply_backward(
        gradients, *saved, ctx.sizes, ctx.scale, ctx.dtype, wants_input
    )
    of_removed_MI, of_masked_MI = of_inputs or (None, None)
    return of_removed_MI, of_masked_MI, of_low_MQ, None, of_up_OQ[:, : ctx.rank], None, None, None


set_gradient(multiply_masked, _differentiate, keep=_keep)

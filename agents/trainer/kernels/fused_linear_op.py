"""Linear layers that share their input, as one custom operator with its gradient.

The down projections of all adapters are one product. In the backward pass each product accumulates
into the gradient of the input (addmm), which avoids separate passes over memory for the sums, and
the gradients of the adapters are produced in the type in which they are accumulated.

Shape letters: M tokens, I inputs, O outputs of one layer, R ranks of all adapters of a set, Q rank
of one adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from agents.trainer.kernels import lora_kernels, nf4
from agents.trainer.kernels.operators import operator, set_gradient, shapes_of


@operator("fused_linear")
def multiply(
    x_MI: Tensor,
    low_MR: Tensor | None,
    down_RI: Tensor | None,
    ups: list[Tensor],
    trained: list[Tensor],
    weights: list[Tensor],
    sizes: list[int],
    scale: float,
) -> list[Tensor]:
    """Return x @ W.T + low @ up.T (M, O) for each layer; the second term only with an adapter.

    Deliberately opaque to the compiler: it would save the result of every product that it can
    trace, even in a layer that recomputes its activations.

    Args:
        x_MI: input of all layers.
        low_MR: outputs of the adapters' down projections.
        down_RI: the down projections, if low = x @ down.T. If None, the gradient of `low` itself
            is returned.
        ups: up projection (O, Q) of each layer with an adapter.
        trained: parameters (Q, I) and (O, Q), whose copies are `down` and `ups` in this order.
            They receive the gradients.
        weights: weight (O, I) of each layer, or its NF4 handle; see `nf4.get_handle`.
        sizes: input features, then output features and rank of each layer; rank 0 without adapter.
        scale: factor that `ups` already contain.
    """
    # The base product is added to the adapter's output: no third tensor of that size.
    started = [] if low_MR is None else _expand(low_MR, ups)
    outputs = []
    for weight, rank in zip(weights, sizes[2::2], strict=True):
        weight_IO = read_weight(weight).T
        is_adapted = low_MR is not None and rank
        outputs.append(started.pop(0).addmm_(x_MI, weight_IO) if is_adapted else x_MI @ weight_IO)
    return outputs


@shapes_of(multiply)
def _multiply_shape(x_MI: Tensor, *others: Any) -> list[Tensor]:
    sizes = others[-2]
    return [x_MI.new_empty((x_MI.shape[0], width)) for width in sizes[1::2]]


@operator("fused_linear_backward")
def _multiply_backward(
    gradients: list[Tensor],
    x_MI: Tensor | None,
    low_MR: Tensor | None,
    down_RI: Tensor | None,
    ups: list[Tensor],
    weights: list[Tensor],
    sizes: list[int],
    scale: float,
    dtype: torch.dtype,
    wants_input: bool,
) -> list[Tensor]:
    """Return the gradients of x, of `down` (or `low`), and of each of `ups`.

    Gradients of parameters have type `dtype`. The gradient of x is empty if it is not requested.
    """
    found_MI = None
    more: list[Tensor] = []
    if low_MR is not None:
        adapted = [g for g, rank in zip(gradients, sizes[2::2], strict=True) if rank]
        low_gradient_MR, more = _differentiate_adapters(adapted, low_MR, ups, scale, dtype)
        if x_MI is None or down_RI is None:
            more.insert(0, low_gradient_MR)
        else:
            more.insert(0, multiply_wide(low_gradient_MR.T, x_MI, dtype))
            found_MI = low_gradient_MR @ down_RI if wants_input else None
    if not wants_input:
        return [gradients[0].new_empty((0, sizes[0])), *more]
    for gradient_MO, weight in zip(gradients, weights, strict=True):
        weight_OI = read_weight(weight)
        if found_MI is None:
            found_MI = gradient_MO @ weight_OI
        else:
            found_MI.addmm_(gradient_MO, weight_OI)
    assert found_MI is not None
    return [found_MI, *more]


@shapes_of(_multiply_backward)
def _multiply_backward_shape(
    gradients: list[Tensor],
    x_MI: Tensor | None,
    low_MR: Tensor | None,
    down_RI: Tensor | None,
    ups: list[Tensor],
    weights: list[Tensor],
    sizes: list[int],
    scale: float,
    dtype: torch.dtype,
    wants_input: bool,
) -> list[Tensor]:
    num_tokens = gradients[0].shape[0] if wants_input else 0
    found = [gradients[0].new_empty((num_tokens, sizes[0]))]
    if low_MR is not None:
        is_taken = down_RI is None
        found.append(
            torch.empty_like(low_MR) if is_taken else torch.empty_like(down_RI, dtype=dtype)
        )
        found += [torch.empty_like(up_OQ, dtype=dtype) for up_OQ in ups]
    return found


def _expand(low_MR: Tensor, ups: list[Tensor]) -> list[Tensor]:
    """Return low @ up.T (M, O) of each adapter."""
    if lora_kernels.supports(low_MR, ups):
        return lora_kernels.expand(low_MR, ups)
    return [low_MQ @ up_OQ.T for low_MQ, up_OQ in zip(_split(low_MR, ups), ups, strict=True)]


def _differentiate_adapters(
    gradients: list[Tensor], low_MR: Tensor, ups: list[Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of `low` and of each of `ups`, the latter in type `dtype`.

    Args:
        gradients: gradient (M, O) of each adapter's output.
    """
    # A single adapter has little to save.
    if len(ups) > 1 and lora_kernels.supports(low_MR, ups):
        of_low_MR = lora_kernels.differentiate_low(gradients, ups)
        return of_low_MR, lora_kernels.differentiate_ups(gradients, low_MR, ups, scale, dtype)
    of_low_MR, of_ups = torch.empty_like(low_MR), []
    parts = _split(of_low_MR, ups), _split(low_MR if scale == 1.0 else low_MR * scale, ups)
    for gradient_MO, up_OQ, of_low_MQ, low_MQ in zip(gradients, ups, *parts, strict=True):
        torch.mm(gradient_MO, up_OQ, out=of_low_MQ)
        of_ups.append(multiply_wide(gradient_MO.T, low_MQ, dtype))
    return of_low_MR, of_ups


def multiply_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in type `dtype`, accumulated and stored without rounding to theirs."""
    if a.is_cuda and dtype == torch.float32 != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_MI, low_MR, down_RI, ups, trained, weights, ctx.sizes, ctx.scale = inputs
    adapters = (low_MR, down_RI, None if down_RI is None else x_MI)
    ctx.has = [tensor is not None for tensor in adapters]
    ctx.num_ups, ctx.num_weights = len(ups), len(weights)
    ctx.trained_sizes = [tuple(parameter.shape) for parameter in trained]
    ctx.dtype = trained[0].dtype if trained else x_MI.dtype
    ctx.save_for_backward(*weights, *ups, *(tensor for tensor in adapters if tensor is not None))


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    # Autograd saves a flat list of tensors, so it is divided by the stored counts.
    weights, saved = saved[: ctx.num_weights], saved[ctx.num_weights :]
    ups, saved = saved[: ctx.num_ups], saved[ctx.num_ups :]
    low_MR, down_RI, x_MI = (saved.pop(0) if has else None for has in ctx.has)
    wants_input = ctx.needs_input_grad[0]  # False in the first layer: its embeddings are frozen
    found_MI, *more = _multiply_backward(
        gradients, x_MI, low_MR, down_RI, ups, weights, ctx.sizes, ctx.scale, ctx.dtype, wants_input
    )
    first = more.pop(0) if low_MR is not None else None
    of_trained, start = [], 0
    if down_RI is not None:
        assert first is not None
        for (rank, _), up_OQ in zip(ctx.trained_sizes, ups, strict=False):
            of_trained.append(first[start : start + rank])
            start += up_OQ.shape[1]
    up_sizes = ctx.trained_sizes[len(of_trained) :]
    # Ranks of the copies are padded; those of the parameters are not.
    of_trained += [found[:, :rank] for found, (_, rank) in zip(more, up_sizes, strict=True)]
    of_low = first if down_RI is None else None
    nothing = [None] * len(ups), of_trained, [None] * len(weights), None, None
    return found_MI if wants_input else None, of_low, None, *nothing


set_gradient(multiply, _differentiate, keep=_keep)


def read_weight(weight: Tensor) -> Tensor:
    """Return the weight (O, I) of one layer, dequantized if necessary."""
    return nf4.read_weights(weight) if weight.dtype == torch.uint8 else weight


def _split(low_MR: Tensor, ups: list[Tensor]) -> Iterable[Tensor]:
    """Return the columns of `low` of each adapter."""
    return low_MR.split([up_OQ.shape[1] for up_OQ in ups], dim=1)

"""The two products of a layer's experts, as custom operators with their gradients.

Every token passes through `top_k` experts. Tokens are sorted by expert once; the first product
reads its rows in that order, and the second one restores the order and adds the results of each
token. So no copy of the tokens per expert outlives the operator, and the sum over a token's experts
has one order. Adapters are separate low-rank products: the sum of a weight and its update is never
formed. NF4 weights are dequantized for one product at a time.

Opaque to the compiler, for the reason that `fused_linear_op` gives. A frozen product saves only the
order of rows for its backward pass.

Shape letters: T tokens, K experts of a token, S = T * K rows, E experts, I inputs, O outputs, Q
rank of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agents.trainer.kernels.grouped import multiply_outer, multiply_rows
from agents.trainer.kernels.nf4 import dequantize_parts
from agents.trainer.kernels.operators import operator, set_gradient, shapes_of

_NF4_PARTS = 6


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Sizes of a product, which the operators take as a list of integers."""

    num_experts: int
    num_inputs: int
    num_outputs: int
    is_transposed: bool
    """True if weights are stored as (E, I, O) instead of (E, O, I)."""
    group_blocks: int
    """Number of NF4 blocks that share the constant of a group; 0 if weights are not quantized."""
    top_k: int
    gathers: bool
    """True if it reads tokens (T, I) in the order of rows, instead of rows (S, I)."""
    sums: bool
    """True if it adds the results of each token (T, O), instead of returning rows (S, O)."""
    rank: int
    """Rank of the adapter; 0 without one."""

    def as_list(self) -> list[int]:
        """Return the sizes in the order of the fields."""
        return [int(getattr(self, name)) for name in self.__slots__]


def _shape(sizes: list[int]) -> GroupedShape:
    experts, inputs, outputs, is_transposed, group_blocks, top_k, gathers, sums, rank = sizes
    return GroupedShape(
        experts, inputs, outputs, bool(is_transposed), group_blocks, top_k,
        bool(gathers), bool(sums), rank,
    )  # fmt: skip


@operator("sort_by_expert")
def sort_by_expert(index_TK: Tensor, num_experts: int) -> list[Tensor]:
    """Return rows sorted by expert: their order (S,), its inverse (S,), and the ends (E,), int32.

    Rows of one expert keep the order of tokens.
    """
    # Stable, so that the order of a token's rows, and of each sum, is the same every time.
    expert_S, order_S = torch.sort(index_TK.reshape(-1), stable=True)
    numbers_E = torch.arange(1, num_experts + 1, dtype=expert_S.dtype, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, out_int32=True)
    return [order_S, torch.argsort(order_S), ends_E]


@shapes_of(sort_by_expert)
def _sort_shape(index_TK: Tensor, num_experts: int) -> list[Tensor]:
    rows = index_TK.numel()
    return [
        index_TK.new_empty((rows,), dtype=torch.int64),
        index_TK.new_empty((rows,), dtype=torch.int64),
        index_TK.new_empty((num_experts,), dtype=torch.int32),
    ]


@operator("reorder")
def reorder(values_S: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
    """Return values_S[order_S]; the gradient is also a lookup, not a sum in arbitrary order."""
    return values_S.index_select(0, order_S)


@shapes_of(reorder)
def _reorder_shape(values_S: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
    return torch.empty_like(values_S)


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order_S, inverse_S = inputs
    ctx.save_for_backward(order_S, inverse_S)


def _reorder_back(ctx: Any, gradient_S: Tensor) -> tuple[Any, ...]:
    order_S, inverse_S = ctx.saved_tensors
    return reorder(gradient_S, inverse_S, order_S), None, None


set_gradient(reorder, _reorder_back, keep=_keep_order)


@operator("grouped_linear")
def multiply(
    x: Tensor,
    route: list[Tensor],
    weights: list[Tensor],
    adapter: list[Tensor],
    sizes: list[int],
    scale: float,
) -> Tensor:
    """Return each row times the weights of its expert, plus its adapter's update.

    Args:
        x: tokens (T, I) or rows (S, I), in the type of the product.
        route: result of `sort_by_expert`.
        weights: one tensor (E, O, I) or (E, I, O), or the six of `nf4.dequantize_parts`.
        adapter: empty, or down (E * Q, I) and up (O, Q * E) projection in the layout of PEFT's
            `target_parameters`; they receive the gradients, in their type.
        sizes: `GroupedShape.as_list`.
        scale: factor of the adapter's update.
    """
    shape, (order_S, inverse_S, ends_E) = _shape(sizes), route
    x_SI = _gather(x, order_S, shape) if shape.gathers else x
    y_SO = multiply_rows(x_SI, _read(weights, shape, x.dtype), ends_E)
    if adapter:
        down_EIQ, up_EQO = _read_adapter(adapter, shape, x.dtype, scale)
        multiply_rows(multiply_rows(x_SI, down_EIQ, ends_E), up_EQO, ends_E, y_SO)
    return _sum(y_SO, inverse_S, shape) if shape.sums else y_SO


@shapes_of(multiply)
def _multiply_shape(
    x: Tensor,
    route: list[Tensor],
    weights: list[Tensor],
    adapter: list[Tensor],
    sizes: list[int],
    scale: float,
) -> Tensor:
    shape = _shape(sizes)
    rows = x.shape[0] * (shape.top_k if shape.gathers else 1)
    return x.new_empty((rows // shape.top_k if shape.sums else rows, shape.num_outputs))


@operator("grouped_linear_backward")
def _multiply_backward(
    gradient: Tensor,
    x: Tensor | None,
    route: list[Tensor],
    weights: list[Tensor],
    adapter: list[Tensor],
    sizes: list[int],
    scale: float,
    wants_input: bool,
    wants_weights: bool,
) -> list[Tensor]:
    """Return the gradients of x, of the weights, and of both projections; empty if not wanted."""
    shape, (order_S, inverse_S, ends_E) = _shape(sizes), route
    gradient_SO = _gather(gradient, order_S, shape) if shape.sums else gradient
    x_SI = None
    if x is not None:
        x_SI = _gather(x, order_S, shape) if shape.gathers else x
    # Separate empty tensors: an operator must not return a tensor twice.
    of_x, of_weights, of_down, of_up = (gradient.new_empty((0,)) for _ in range(4))
    if wants_input:
        weight_EOI = _read(weights, shape, gradient.dtype).transpose(1, 2)
        of_x = multiply_rows(gradient_SO, weight_EOI, ends_E)
        # Dequantized weights of all experts are large: freed before the adapter's products.
        del weight_EOI
    if adapter:
        assert x_SI is not None
        down_EIQ, up_EQO = _read_adapter(adapter, shape, gradient.dtype, scale)
        low_SQ = multiply_rows(x_SI, down_EIQ, ends_E)
        of_low_SQ = multiply_rows(gradient_SO, up_EQO.transpose(1, 2), ends_E)
        of_down, of_up = _differentiate_adapter(
            x_SI, low_SQ, of_low_SQ, gradient_SO, ends_E, adapter, scale
        )
        if wants_input:
            multiply_rows(of_low_SQ, down_EIQ.transpose(1, 2), ends_E, of_x)
    if wants_weights:
        assert x_SI is not None
        pair = (x_SI, gradient_SO) if shape.is_transposed else (gradient_SO, x_SI)
        of_weights = multiply_outer(*pair, ends_E, weights[0].dtype)
    if wants_input and shape.gathers:
        of_x = _sum(of_x, inverse_S, shape)
    return [of_x, of_weights, of_down, of_up]


@shapes_of(_multiply_backward)
def _multiply_backward_shape(
    gradient: Tensor,
    x: Tensor | None,
    route: list[Tensor],
    weights: list[Tensor],
    adapter: list[Tensor],
    sizes: list[int],
    scale: float,
    wants_input: bool,
    wants_weights: bool,
) -> list[Tensor]:
    shape = _shape(sizes)
    rows = gradient.shape[0] * (shape.top_k if shape.sums else 1)
    rows = rows // shape.top_k if shape.gathers else rows
    return [
        gradient.new_empty((rows, shape.num_inputs) if wants_input else (0,)),
        torch.empty_like(weights[0]) if wants_weights else gradient.new_empty((0,)),
        *(
            [torch.empty_like(part) for part in adapter]
            or [gradient.new_empty((0,)), gradient.new_empty((0,))]
        ),
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, route, weights, adapter, ctx.sizes, ctx.scale = inputs
    ctx.wants_weights = len(weights) == 1 and weights[0].requires_grad
    ctx.num_weights, ctx.num_adapter = len(weights), len(adapter)
    # A frozen product needs no input for its backward pass.
    ctx.has_input = bool(adapter) or ctx.wants_weights
    ctx.save_for_backward(*route, *weights, *adapter, *([x] if ctx.has_input else []))


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    route, saved = saved[:3], saved[3:]
    weights, saved = saved[: ctx.num_weights], saved[ctx.num_weights :]
    adapter, saved = saved[: ctx.num_adapter], saved[ctx.num_adapter :]
    x = saved[0] if ctx.has_input else None
    wants_input = ctx.needs_input_grad[0]
    of_x, of_weights, *of_adapter = _multiply_backward(
        gradient.contiguous(), x, route, weights, adapter, ctx.sizes, ctx.scale,
        wants_input, ctx.wants_weights,
    )  # fmt: skip
    return (
        of_x if wants_input else None,
        [None] * 3,
        [of_weights] if ctx.wants_weights else [None] * ctx.num_weights,
        of_adapter[: ctx.num_adapter],
        None,
        None,
    )


set_gradient(multiply, _differentiate, keep=_keep)


def _gather(values_T: Tensor, order_S: Tensor, shape: GroupedShape) -> Tensor:
    """Return the token of each row."""
    return values_T.index_select(0, order_S // shape.top_k)


def _sum(values_S: Tensor, inverse_S: Tensor, shape: GroupedShape) -> Tensor:
    """Return the sum of each token's rows; each has exactly `top_k`."""
    values_SN = values_S.index_select(0, inverse_S)
    return values_SN.view(-1, shape.top_k, values_S.shape[1]).sum(dim=1)


def _read(weights: list[Tensor], shape: GroupedShape, dtype: torch.dtype) -> Tensor:
    """Return the weights of all experts (E, I, O), dequantized if necessary."""
    if len(weights) == _NF4_PARTS:
        pair = (shape.num_outputs, shape.num_inputs)
        size = (shape.num_experts, *(reversed(pair) if shape.is_transposed else pair))
        stored = dequantize_parts(weights, size, dtype, shape.group_blocks)
    else:
        stored = weights[0].to(dtype)
    return stored if shape.is_transposed else stored.transpose(1, 2)


def _read_adapter(
    adapter: list[Tensor], shape: GroupedShape, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the projections down (E, I, Q) and up (E, Q, O), the latter with the factor."""
    down, up = adapter
    down_EQI = down.to(dtype).view(shape.num_experts, shape.rank, shape.num_inputs)
    up_OQE = (up * scale).to(dtype).view(shape.num_outputs, shape.rank, shape.num_experts)
    # Contiguous along the outputs: in files the experts are innermost.
    return down_EQI.transpose(1, 2), up_OQE.permute(2, 1, 0).contiguous()


def _differentiate_adapter(
    x_SI: Tensor,
    low_SQ: Tensor,
    of_low_SQ: Tensor,
    gradient_SO: Tensor,
    ends_E: Tensor,
    adapter: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the projections in their layout and type."""
    down, up = adapter
    of_down_EQI = multiply_outer(of_low_SQ, x_SI, ends_E, down.dtype)
    of_up_EOQ = multiply_outer(gradient_SO, low_SQ, ends_E, up.dtype, scale)
    return of_down_EQI.view_as(down), of_up_EOQ.permute(1, 2, 0).reshape(up.shape)

"""FlashAttention over the segments of a flat row, as a custom operator for compiled layers.

The forward pass is cuDNN's where it is faster (Hopper and later, all segments of equal length),
and otherwise FlashAttention 2 (Dao 2023, arXiv:2307.08691). Both return the same log-sum-exp, so
either backward pass can follow either forward pass.

Runs that must be bit-equal use a deterministic backward pass: the default ones accumulate the
gradient of the queries in an order that changes from run to run. PyTorch selects FlashAttention's
deterministic form only in strict mode, and cuDNN's never, so `cudnn_attention` calls that itself.

Shape letters: H heads, M tokens of the flat row, T of one segment, S segments, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agents.trainer.kernels import cudnn_attention
from agents.trainer.kernels.operators import operator, set_gradient, shapes_of

_aten: Any = torch.ops.aten
# FlashAttention is faster on older cards.
_CUDNN_CAPABILITY = (9, 0)
# Wider heads use FlashAttention.
_WIDEST_CUDNN = 128


def flash_attention(
    query_MHD: Tensor,
    key_MHD: Tensor,
    value_MHD: Tensor,
    bounds_S: Tensor,
    host_extent_2: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Return causal attention within each segment (M, H, D); keys may have fewer heads.

    Args:
        query_MHD: queries in half precision, on a GPU.
        key_MHD: keys of the same type.
        value_MHD: values of the same type.
        bounds_S: first token of each segment and the total number of tokens, int32 on the GPU.
            The last segments may be empty.
        host_extent_2: see `Segments`.
        scale: factor of the scores.
        window: number of tokens that each token attends to, including itself; 0 for all before it.
    """
    # FlashAttention returns results with the memory order of its inputs' axes, which the compiler
    # has to know in advance. For copied inputs the compiler creates this order directly.
    query, key, value = (_put_tokens_first(x) for x in (query_MHD, key_MHD, value_MHD))
    out_MHD: Tensor
    out_MHD, _ = _attend(query, key, value, bounds_S, host_extent_2, scale, window)
    return out_MHD


def _put_tokens_first(x_MHD: Tensor) -> Tensor:
    return x_MHD if x_MHD.stride(0) >= x_MHD.stride(1) else x_MHD.contiguous()


@operator("attend")
def _attend(
    query_MHD: Tensor,
    key_MHD: Tensor,
    value_MHD: Tensor,
    bounds_S: Tensor,
    host_extent_2: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    # In host memory: reading the bounds on the GPU would wait for the device.
    longest, equal = host_extent_2.tolist()
    window = window if 0 < window < longest else 0
    if _takes_cudnn(query_MHD, equal, window):
        return _attend_cudnn(query_MHD, key_MHD, value_MHD, equal, scale)
    out_MHD, lse_HM, *_ = _aten._flash_attention_forward(
        query_MHD, key_MHD, value_MHD, bounds_S, bounds_S, longest, longest,
        0.0, not window, False, scale=scale, **_window(window),
    )  # fmt: skip
    return out_MHD, lse_HM


@shapes_of(_attend)
def _attend_shape(
    query_MHD: Tensor, key_MHD: Tensor, value_MHD: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _width = query_MHD.shape
    out_MHD = query_MHD.new_empty(query_MHD.shape)
    return out_MHD, query_MHD.new_empty((num_heads, num_tokens), dtype=torch.float32)


@operator("attend_backward")
def _attend_backward(
    gradient_MHD: Tensor,
    query_MHD: Tensor,
    key_MHD: Tensor,
    value_MHD: Tensor,
    out_MHD: Tensor,
    lse_HM: Tensor,
    bounds_S: Tensor,
    host_extent_2: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    longest, equal = host_extent_2.tolist()
    window = window if 0 < window < longest else 0
    if _takes_cudnn(query_MHD, equal, window):
        inputs = (gradient_MHD, query_MHD, key_MHD, value_MHD, out_MHD)
        if not torch.are_deterministic_algorithms_enabled():
            return _differentiate_cudnn(inputs, lse_HM, equal, scale)
        exact = cudnn_attention.differentiate(inputs, lse_HM, equal, scale)
        if exact is not None:
            return exact
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query_MHD.device)
    with _strictly_deterministic():
        gradients = _aten._flash_attention_backward(
            gradient_MHD.contiguous(), query_MHD, key_MHD, value_MHD, out_MHD, lse_HM,
            bounds_S, bounds_S, longest, longest, 0.0, not window, no_dropout, no_dropout,
            scale=scale, **_window(window),
        )  # fmt: skip
    return tuple(gradients)


@shapes_of(_attend_backward)
def _attend_backward_shape(
    _: Tensor, query_MHD: Tensor, key_MHD: Tensor, value_MHD: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (query_MHD, key_MHD, value_MHD)
    query, key, value = (x.new_empty(x.shape) for x in inputs)
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient_MHD: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, bounds, host_extent, out, lse = ctx.saved_tensors
    gradients = _attend_backward(
        gradient_MHD, query, key, value, out, lse, bounds, host_extent, ctx.scale, ctx.window
    )
    return (*gradients, None, None, None, None)


set_gradient(_attend, _differentiate, keep=_keep)


def _attend_cudnn(
    query_MHD: Tensor, key_MHD: Tensor, value_MHD: Tensor, length: int, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = (
        x.unflatten(0, (-1, length)).transpose(1, 2) for x in (query_MHD, key_MHD, value_MHD)
    )
    out_SHTD, lse_SHT1, *_ = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    out_MHD = out_SHTD.transpose(1, 2).flatten(0, 1).contiguous()
    num_heads = query_MHD.shape[1]
    lse_SHT = lse_SHT1.reshape(-1, num_heads, length)
    return out_MHD, lse_SHT.transpose(0, 1).reshape(num_heads, -1).contiguous()


def _differentiate_cudnn(
    inputs: tuple[Tensor, ...], lse_HM: Tensor, length: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, out = (
        x.unflatten(0, (-1, length)).transpose(1, 2) for x in inputs
    )
    lse_SHT1 = lse_HM.unflatten(1, (-1, length)).transpose(0, 1).unsqueeze(-1).contiguous()
    no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
    found = _aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, lse_SHT1, no_dropout, no_dropout, None, None, None,
        length, length, 0.0, True, scale=scale,
    )  # fmt: skip
    one, two, three = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in found)
    return one, two, three


def _takes_cudnn(query_MHD: Tensor, equal: int, window: int) -> bool:
    narrow = query_MHD.shape[-1] <= _WIDEST_CUDNN
    return bool(equal and not window and narrow and _has_cudnn(query_MHD.device))


@functools.cache
def _has_cudnn(device: torch.device) -> bool:
    return (
        torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(device) >= _CUDNN_CAPABILITY
    )


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


@contextmanager
def _strictly_deterministic() -> Iterator[None]:
    """Select deterministic kernels if the process asks for them.

    In PyTorch's warn-only mode FlashAttention would warn and then run its default backward pass.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)

"""Attention with soft caps, sinks or wide heads, as a custom operator for compiled layers.

FlashAttention 2 and cuDNN support neither soft-capped scores (Gemma 2, arXiv:2408.00118), nor sinks
(gpt-oss, arXiv:2508.10925), nor heads wider than 256 (Gemma 4). `segment_kernels` computes them in
half precision on GPUs since Ampere; other cases are computed segment by segment. The kernels read
the bounds of the segments only on the device, so a recorded launch serves every division of a row
into as many segments.

Deliberately opaque to the compiler: it cannot trace a loop over segments whose bounds are data, and
would keep results that a recomputing layer should compute again.

Shape letters: H query heads, K heads of keys and values, M tokens of the flat row, S segments, D
width of queries and keys, E width of values.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from agents.trainer.kernels import compiling, segment_launcher, segment_loop
from agents.trainer.kernels.operators import operator, set_gradient, shapes_of

_NARROW = (torch.bfloat16, torch.float16)
# Triton's products use no tensor cores on older cards.
_CAPABILITY = (8, 0)


def attend(
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    bounds_S: Tensor,
    host_bounds_S: Tensor,
    *,
    sinks_H: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Return causal attention within each segment (M, H, E).

    Args:
        query_MHD: queries.
        key_MKD: keys of the same type; may have fewer heads.
        value_MKE: values of the same type.
        bounds_S: first token of each segment and the total number of tokens, int32, on the device
            of the queries. Segments may be empty.
        host_bounds_S: the same bounds in host memory; read only if no kernel runs.
        sinks_H: one more score of each head, of a key without value; None without sinks.
        scale: factor of the scores.
        window: number of tokens that each token attends to, including itself; 0 for all before it.
        softcap: limit c of the scores, c * tanh(score / c); 0 for no limit.
    """
    out_MHE: Tensor
    out_MHE, _ = _attend(
        query_MHD, key_MKD, value_MKE, bounds_S, host_bounds_S, sinks_H, scale, window, softcap
    )
    return out_MHE


@functools.cache
def has_kernel(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Return whether kernels compute heads of these widths, without reading bounds on the host."""
    return (
        dtype in _NARROW
        and max(width, value_width) <= segment_launcher.WIDEST_HEAD
        and compiling.find_obstacle(device) is None
        and torch.cuda.get_device_capability(device) >= _CAPABILITY
        and _works(device, dtype, width, value_width)
    )


@operator("segment_attention")
def _attend(
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    bounds_S: Tensor,
    host_bounds_S: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    query, key, value = (_close(x) for x in (query_MHD, key_MKD, value_MKE))
    if _takes_kernel(query, key, value):
        return segment_launcher.attend(query, key, value, bounds_S, sinks_H, scale, window, softcap)
    return segment_loop.attend(query, key, value, host_bounds_S, sinks_H, scale, window, softcap)


@shapes_of(_attend)
def _attend_shape(
    query_MHD: Tensor, key_MKD: Tensor, value_MKE: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _width = query_MHD.shape
    wide = torch.promote_types(query_MHD.dtype, torch.float32)
    out_MHE = query_MHD.new_empty((num_tokens, num_heads, value_MKE.shape[2]))
    return out_MHE, query_MHD.new_empty((num_heads, num_tokens), dtype=wide)


@operator("segment_attention_backward")
def _attend_backward(
    gradient_MHE: Tensor,
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    out_MHE: Tensor,
    lse_HM: Tensor,
    bounds_S: Tensor,
    host_bounds_S: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value = (_close(x) for x in (query_MHD, key_MKD, value_MKE))
    if _takes_kernel(query, key, value):
        return segment_launcher.differentiate(
            gradient_MHE, query, key, value, out_MHE, lse_HM, bounds_S, scale, window, softcap
        )
    return segment_loop.differentiate(
        gradient_MHE, query, key, value, out_MHE, lse_HM, host_bounds_S, scale, window, softcap
    )


@shapes_of(_attend_backward)
def _attend_backward_shape(
    _: Tensor, query_MHD: Tensor, key_MKD: Tensor, value_MKE: Tensor, out: Tensor, lse_HM: Tensor,
    *__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (query_MHD, key_MKD, value_MKE)
    query, key, value = (x.new_empty(x.shape) for x in inputs)
    return query, key, value, lse_HM.new_empty(lse_HM.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, sinks_H, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output, *(() if sinks_H is None else (sinks_H,)))


def _differentiate(ctx: Any, gradient_MHE: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, bounds, host_bounds, out, lse_HM, *sinks = ctx.saved_tensors
    *gradients, delta_HM = _attend_backward(
        gradient_MHE, query, key, value, out, lse_HM, bounds, host_bounds,
        ctx.scale, ctx.window, ctx.softcap,
    )  # fmt: skip
    of_sinks = None
    if ctx.needs_input_grad[5]:
        # A sink has no value: only the softmax's part of its weight's gradient remains.
        weights_HM = torch.exp2(sinks[0].to(lse_HM.dtype)[:, None] * segment_loop.LOG2E - lse_HM)
        of_sinks = -(weights_HM * delta_HM).sum(1).to(sinks[0].dtype)
    return (*gradients, None, None, of_sinks, None, None, None)


set_gradient(_attend, _differentiate, keep=_keep)


def _close(x: Tensor) -> Tensor:
    """Return the tensor with contiguous features of a head."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _takes_kernel(query_MHD: Tensor, key_MKD: Tensor, value_MKE: Tensor) -> bool:
    width, value_width = query_MHD.shape[2], value_MKE.shape[2]
    return query_MHD.is_cuda and has_kernel(query_MHD.device, query_MHD.dtype, width, value_width)


def _works(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Return whether the kernels run on this card; few kinds of cards were tested."""
    try:
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        query, key = (torch.zeros(16, heads, width, **kind) for heads in (2, 1))
        value = torch.zeros(16, 1, value_width, **kind)
        bounds = torch.tensor([0, 16], dtype=torch.int32, device=device)
        settings = (1.0, 8, 30.0)
        out, lse = segment_launcher.attend(query, key, value, bounds, None, *settings)
        segment_launcher.differentiate(out, query, key, value, out, lse, bounds, *settings)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton and its compilers fail in many ways
        print(f"Attention is computed segment by segment: {error}", file=sys.stderr)
        return False
    return True

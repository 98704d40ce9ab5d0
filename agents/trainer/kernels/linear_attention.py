"""Linear attention with a decaying state, for all segments of a flat row at once.

Per head a state S (K, V) is read and written once per token, and starts at zero in each segment:
S_t = a_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (Mamba 2: Dao and Gu 2024, arXiv:2405.21060). The
gated delta rule writes b_t (v_t - a_t S_{t-1}^T k_t) instead of v_t (Yang et al. 2024,
arXiv:2412.06464).

Both are computed in chunks of the row: within a chunk as attention, between chunks by their states
(sections 6 and 3.3). A chunk may hold several segments, and a segment several chunks; pairs of
tokens of different segments get a weight of exactly 0. The segments are read on the device, so
shapes depend only on the number of tokens.

To the compiler it is one opaque operation that saves only its inputs: the backward pass repeats the
forward pass, which would otherwise keep some twenty tensors of fp32.

Shape letters: M tokens, G heads of queries and keys, H of values (a multiple of G), K and V their
widths, C chunks, L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from agents.trainer.kernels.operators import operator, set_gradient, shapes_of

_CHUNK_TOKENS = 64
# Added to the squared length for `normalizes`, as in Transformers' classes.
_TINY = 1e-6


@operator("attend_linearly")
def attend_linearly(
    query_MGK: Tensor,
    key_MGK: Tensor,
    value_MHV: Tensor,
    decay_MH: Tensor,
    strength_MH: Tensor | None,
    segment_M: Tensor,
    scale: float,
    normalizes: bool,
) -> Tensor:
    """Return each token's reading of its segment's state (M, H, V), in the type of values.

    Computed in at least fp32, also under autocast.

    Args:
        decay_MH: logarithm of a_t, at most 0.
        strength_MH: b_t of the gated delta rule; None for Mamba 2.
        segment_M: number of each token's segment, ascending, from 0.
        scale: factor of the queries.
        normalizes: True to divide queries and keys by their lengths first.
    """
    with torch.autocast(query_MGK.device.type, enabled=False):
        inputs = (query_MGK, key_MGK, value_MHV, decay_MH, strength_MH)
        out_MHV = _compute(inputs, segment_M, scale, normalizes=normalizes)
        return out_MHV.to(value_MHV.dtype)


@shapes_of(attend_linearly)
def _attend_shape(_: Tensor, __: Tensor, value_MHV: Tensor, *___: Any) -> Tensor:
    return value_MHV.new_empty(value_MHV.shape)


@operator("attend_linearly_backward")
def _attend_backward(
    gradient_MHV: Tensor,
    query_MGK: Tensor,
    key_MGK: Tensor,
    value_MHV: Tensor,
    decay_MH: Tensor,
    strength_MH: Tensor | None,
    segment_M: Tensor,
    scale: float,
    normalizes: bool,
) -> list[Tensor]:
    inputs = (query_MGK, key_MGK, value_MHV, decay_MH, strength_MH)
    with torch.autocast(query_MGK.device.type, enabled=False), _recording():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        out_MHV = _compute(tuple(leaves), segment_M, scale, normalizes=normalizes)
        wanted = [x for x in leaves if x is not None]
        gradients = torch.autograd.grad(out_MHV, wanted, gradient_MHV.to(out_MHV.dtype))
        # In the memory order that the compiler expects; autograd's order starts with the heads.
        return [x.contiguous() for x in gradients]


@shapes_of(_attend_backward)
def _attend_backward_shape(_: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:5] if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.normalizes = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient_MHV: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a layer that recomputes returns them only once
    found = iter(_attend_backward(gradient_MHV, *saved, ctx.scale, ctx.normalizes))
    return (*(None if x is None else next(found) for x in saved[:5]), None, None, None)


set_gradient(attend_linearly, _differentiate, keep=_keep)


@contextmanager
def _recording() -> Iterator[None]:
    """Record gradients inside a custom operation, where PyTorch disables that."""
    off = torch._C._dispatch_tls_local_exclude_set()
    on = off - torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, on), torch.enable_grad():
        yield


def _compute(
    inputs: tuple[Tensor | None, ...], segment_M: Tensor, scale: float, *, normalizes: bool
) -> Tensor:
    strength_MH = inputs[4]
    query, key, value, decay = (_cut(x) for x in inputs[:4] if x is not None)
    if normalizes:
        query, key = (x * (x.square().sum(-1, keepdim=True) + _TINY).rsqrt() for x in (query, key))
    query_HCLK, key_HCLK = (_repeat(x, len(value)) for x in (query * scale, key))
    same_CLL, reads_CL, writes_CL, keeps_C = _relate(segment_M)
    sum_HCL = decay.squeeze(-1).cumsum(-1)
    # Differences of sums, not quotients of products, which would underflow for strong decays.
    pair_HCLL = (sum_HCL.unsqueeze(-1) - sum_HCL.unsqueeze(-2)).masked_fill(~same_CLL, -torch.inf)
    pair_HCLL = pair_HCLL.exp()
    from_start_HCL1 = (sum_HCL.exp() * reads_CL).unsqueeze(-1)
    to_end_HCL1 = ((sum_HCL[..., -1:] - sum_HCL).exp() * writes_CL).unsqueeze(-1)
    carried_HC = sum_HCL[..., -1].exp() * keeps_C
    forget_HCLK = None
    if strength_MH is not None:
        strength = _cut(strength_MH)
        # A token's correction depends on those of earlier tokens in the chunk: a triangular system.
        strong_HCLK = key_HCLK * strength
        system_HCLL = (strong_HCLK @ key_HCLK.mT) * pair_HCLL
        right_HCL = torch.cat([value * strength, strong_HCLK * from_start_HCL1], dim=-1)
        solved_HCL = torch.linalg.solve_triangular(
            system_HCLL, right_HCL, upper=False, unitriangular=True
        )
        value, forget_HCLK = solved_HCL.split([value.shape[-1], key.shape[-1]], dim=-1)
    written_HCLV, state_HCKV = _Scan.apply(key_HCLK * to_end_HCL1, value, carried_HC, forget_HCLK)
    within_HCLV = ((query_HCLK @ key_HCLK.mT) * pair_HCLL) @ written_HCLV
    out_HCLV = within_HCLV + (query_HCLK * from_start_HCL1) @ state_HCKV
    out_MHV = out_HCLV.flatten(1, 2).transpose(0, 1)[: len(segment_M)]
    return out_MHV.contiguous()


def _cut(x: Tensor) -> Tensor:
    """Cut (M, H) or (M, H, K) into chunks (H, C, L, 1 or K) of at least fp32; pad with 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide.unsqueeze(-1) if wide.dim() == 2 else wide
    padding = -len(wide) % _CHUNK_TOKENS
    wide = F.pad(wide, (0, 0, 0, 0, 0, padding)).transpose(0, 1)
    return wide.unflatten(1, (-1, _CHUNK_TOKENS))


def _repeat(x_GCLK: Tensor, num_heads: int) -> Tensor:
    times = num_heads // len(x_GCLK)
    return x_GCLK.unsqueeze(1).expand(-1, times, -1, -1, -1).flatten(0, 1)


def _relate(segment_M: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return masks that relate tokens of chunks to each other and to the states around.

    Pairs where the second token is not later and in the same segment (C, L, L); tokens whose
    segment starts before the chunk (C, L); tokens whose segment lasts to the end of the chunk (C,
    L); chunks that lie completely in the segment before them (C,).
    """
    padding = -len(segment_M) % _CHUNK_TOKENS
    segment_CL = F.pad(segment_M, (0, padding), value=-1).unflatten(0, (-1, _CHUNK_TOKENS))
    last_C1 = segment_CL[:, -1:]
    before_C1 = F.pad(last_C1[:-1], (0, 0, 1, 0), value=-2)
    same_CLL = (segment_CL.unsqueeze(-1) == segment_CL.unsqueeze(-2)).tril()
    reads_CL = segment_CL == before_C1
    return same_CLL, reads_CL, segment_CL == last_C1, (last_C1 == before_C1).squeeze(-1)


class _Scan(torch.autograd.Function):
    """States between chunks, one after the other: the part that cannot be parallelized."""

    @staticmethod
    def forward(
        ctx: Any,
        key_HCLK: Tensor,
        value_HCLV: Tensor,
        carried_HC: Tensor,
        forget_HCLK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the written values (H, C, L, V) and the state before each chunk (H, C, K, V).

        written = value - forget @ state; next state = carried * state + key^T @ written.
        """
        num_heads, num_chunks, _, width = key_HCLK.shape
        shape = (num_heads, num_chunks, width, value_HCLV.shape[-1])
        # All states are kept: the backward pass reads each of them.
        state_HCKV = value_HCLV.new_zeros(shape)
        written_HCLV = value_HCLV.clone() if forget_HCLK is not None else value_HCLV
        for chunk in range(num_chunks):
            state_HKV, written_HLV = state_HCKV[:, chunk], written_HCLV[:, chunk]
            if forget_HCLK is not None:
                written_HLV.baddbmm_(forget_HCLK[:, chunk], state_HKV, alpha=-1)
            if chunk + 1 < num_chunks:
                kept_HKV = state_HKV * carried_HC[:, chunk, None, None]
                torch.baddbmm(
                    kept_HKV, key_HCLK[:, chunk].mT, written_HLV, out=state_HCKV[:, chunk + 1]
                )
        ctx.save_for_backward(key_HCLK, written_HCLV, carried_HC, forget_HCLK, state_HCKV)
        return written_HCLV, state_HCKV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Process the chunks from the last to the first."""
        key_HCLK, written_HCLV, carried_HC, forget_HCLK, state_HCKV = ctx.saved_tensors
        of_written_HCLV, of_state_HCKV = (x.clone() for x in gradients)
        # Gradient of the state after each chunk.
        after_HCKV = torch.zeros_like(state_HCKV)
        for chunk in reversed(range(key_HCLK.shape[1])):
            after_HKV, of_HLV = after_HCKV[:, chunk], of_written_HCLV[:, chunk]
            of_HLV.baddbmm_(key_HCLK[:, chunk], after_HKV)
            if chunk:
                before_HKV = of_state_HCKV[:, chunk] + after_HKV * carried_HC[:, chunk, None, None]
                if forget_HCLK is not None:
                    before_HKV.baddbmm_(forget_HCLK[:, chunk].mT, of_HLV, alpha=-1)
                after_HCKV[:, chunk - 1] = before_HKV
        of_key_HCLK = written_HCLV @ after_HCKV.mT
        of_carried_HC = (state_HCKV * after_HCKV).sum((-1, -2))
        of_forget = None if forget_HCLK is None else -(of_written_HCLV @ state_HCKV.mT)
        return of_key_HCLK, of_written_HCLV, of_carried_HC, of_forget


def convolve(x_1FM: Tensor, weight_FJ: Tensor, bias_F: Tensor | None, place_M: Tensor) -> Tensor:
    """Return the causal depthwise convolution (1, F, M) of each segment, in at least fp32.

    Args:
        x_1FM: F features of M tokens.
        weight_FJ: weights of a token and the J - 1 before it; the last one is the token's own.
        bias_F: bias, or None.
        place_M: place of each token in its segment, from 0.
    """
    wide = torch.promote_types(x_1FM.dtype, torch.float32)
    x_1FM, weight_FJ = x_1FM.to(wide), weight_FJ.to(wide)
    num_tokens, taps = x_1FM.shape[-1], weight_FJ.shape[-1]
    sum_1FM = x_1FM * weight_FJ[:, -1:]
    for back in range(1, taps):
        earlier_1FM = F.pad(x_1FM, (back, 0))[..., :num_tokens]
        earlier_1FM = torch.where(place_M >= back, earlier_1FM, 0.0)
        sum_1FM = sum_1FM + earlier_1FM * weight_FJ[:, taps - 1 - back, None]
    return sum_1FM if bias_F is None else sum_1FM + bias_F.to(wide)[:, None]

"""Attention segment by segment from plain operations, with explicit gradients.

For cases without `segment_kernels`: CPUs, fp32 and fp64, older GPUs. Slow, since every segment is a
few separate products, but exact to the type. It follows the published formulas: a score is scaled,
capped (Gemma 2, arXiv:2408.00118), masked, and joined by its head's sink (gpt-oss,
arXiv:2508.10925), which takes a part of the softmax and has no value. The gradients follow
FlashAttention 2 (Dao 2023, arXiv:2307.08691, section 3.1).

Shape letters: H query heads, K heads of keys and values, G query heads of one key head, M tokens of
the flat row, T of one segment, S segments, D width of queries and keys, E width of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
"""Factor from natural logarithms to the base 2 of the stored log-sum-exp."""
# Maximum number of scores at once. With more, the heads of a segment are computed one by one.
_MAX_SCORES = 1 << 26


def attend(
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    host_bounds_S: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return attention (M, H, E) and its log-sum-exp (H, M); see `segment_attention.attend`."""
    wide = torch.promote_types(query_MHD.dtype, torch.float32)
    num_tokens, num_heads, _ = query_MHD.shape
    out_MHE = query_MHD.new_empty((num_tokens, num_heads, value_MKE.shape[2]))
    lse_HM = query_MHD.new_empty((num_heads, num_tokens), dtype=wide)
    for tokens, keys, heads in _pieces(query_MHD, key_MKD, host_bounds_S):
        query_KGTD = _group(query_MHD[tokens, heads], keys)
        scores_KGTT, _ = _score(query_KGTD, key_MKD[tokens, keys], scale, window, softcap)
        lse_KGT = scores_KGTT.logsumexp(3)
        if sinks_H is not None:
            sinks_KG1 = sinks_H[heads].to(wide).reshape(*lse_KGT.shape[:2], 1)
            # A sink adds its weight to the sum alone: it has no value to attend to.
            lse_KGT = torch.logaddexp(lse_KGT, sinks_KG1)
        weights_KGTT = (scores_KGTT - lse_KGT.unsqueeze(3)).exp().to(query_MHD.dtype)
        out_KGTE = weights_KGTT @ value_MKE[tokens, keys].transpose(0, 1).unsqueeze(1)
        out_MHE[tokens, heads] = out_KGTE.flatten(0, 1).transpose(0, 1)
        lse_HM[heads, tokens] = lse_KGT.flatten(0, 1) * LOG2E
    return out_MHE, lse_HM


def differentiate(
    gradient_MHE: Tensor,
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKE: Tensor,
    out_MHE: Tensor,
    lse_HM: Tensor,
    host_bounds_S: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and delta.

    Delta (H, M) is the product of the output of each token with its gradient.
    """
    wide = lse_HM.dtype
    delta_HM = (gradient_MHE.to(wide) * out_MHE.to(wide)).sum(2).T.contiguous()
    found = [x.new_empty(x.shape) for x in (query_MHD, key_MKD, value_MKE)]
    for tokens, keys, heads in _pieces(query_MHD, key_MKD, host_bounds_S):
        query_KGTD, gradient_KGTE = (
            _group(x[tokens, heads], keys) for x in (query_MHD, gradient_MHE)
        )
        key_K1TD, value_K1TE = (
            x[tokens, keys].transpose(0, 1).unsqueeze(1) for x in (key_MKD, value_MKE)
        )
        scores_KGTT, slope_KGTT = _score(query_KGTD, key_MKD[tokens, keys], scale, window, softcap)
        lse_KGT, delta_KGT = (
            x[heads, tokens].unflatten(0, (keys.stop - keys.start, -1)) for x in (lse_HM, delta_HM)
        )
        weights_KGTT = (scores_KGTT - lse_KGT.unsqueeze(3) / LOG2E).exp()
        of_weights_KGTT = (gradient_KGTE @ value_K1TE.transpose(2, 3)).to(wide)
        of_scores_KGTT = weights_KGTT * (of_weights_KGTT - delta_KGT.unsqueeze(3)) * scale
        if slope_KGTT is not None:
            of_scores_KGTT *= slope_KGTT
        of_scores_KGTT = of_scores_KGTT.to(query_MHD.dtype)
        of_query_KGTD = of_scores_KGTT @ key_K1TD
        found[0][tokens, heads] = of_query_KGTD.flatten(0, 1).transpose(0, 1)
        # Summed over the query heads that share the key head.
        of_key_KTD = (of_scores_KGTT.transpose(2, 3) @ query_KGTD).sum(1)
        found[1][tokens, keys] = of_key_KTD.transpose(0, 1)
        weights_KGTT = weights_KGTT.to(query_MHD.dtype)
        of_value_KTE = (weights_KGTT.transpose(2, 3) @ gradient_KGTE).sum(1)
        found[2][tokens, keys] = of_value_KTE.transpose(0, 1)
    return found[0], found[1], found[2], delta_HM


def read_bounds(host_bounds_S: Tensor, device: torch.device) -> list[int]:
    """Return the bounds of the segments.

    From host memory, because reading the device's copy would wait for it.

    Raises:
        RuntimeError: a CUDA graph is being recorded, which would repeat these bounds for other
            rows.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention segment by segment cannot be recorded for other rows")
    bounds: list[int] = host_bounds_S.tolist()
    return bounds


def _pieces(
    query_MHD: Tensor, key_MKD: Tensor, host_bounds_S: Tensor
) -> Iterator[tuple[slice, slice, slice]]:
    """Yield tokens, key heads and query heads of each piece that is computed at once."""
    num_heads, num_keys = query_MHD.shape[1], key_MKD.shape[1]
    group = num_heads // num_keys
    for start, stop in pairwise(read_bounds(host_bounds_S, query_MHD.device)):
        if start == stop:
            continue
        together = num_keys if num_heads * (stop - start) ** 2 <= _MAX_SCORES else 1
        for key in range(0, num_keys, together):
            last = key + together
            yield slice(start, stop), slice(key, last), slice(key * group, last * group)


def _group(x_THD: Tensor, keys: slice) -> Tensor:
    """Return queries, or tensors of their shape, as (K, G, T, D)."""
    return x_THD.transpose(0, 1).unflatten(0, (keys.stop - keys.start, -1))


def _score(
    query_KGTD: Tensor, key_TKD: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Return masked scores (K, G, T, T), and their derivative by the products unless it is 1."""
    wide = torch.promote_types(query_KGTD.dtype, torch.float32)
    scores_KGTT = (query_KGTD @ key_TKD.permute(1, 2, 0).unsqueeze(1)).to(wide) * scale
    slope_KGTT = None
    if softcap:
        share_KGTT = torch.tanh(scores_KGTT / softcap)
        # The derivative of c * tanh(s / c) is 1 - tanh(s / c)^2.
        scores_KGTT, slope_KGTT = share_KGTT * softcap, 1.0 - share_KGTT * share_KGTT
    place_T = torch.arange(len(key_TKD), device=key_TKD.device)
    distance_TT = place_T[:, None] - place_T
    refused_TT = distance_TT < 0
    if window:
        refused_TT = refused_TT | (distance_TT >= window)
    return scores_KGTT.masked_fill(refused_TT, -torch.inf), slope_KGTT

"""Count the scratch memory of attention's exact backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Maximum scratch and maximum tokens of one cuDNN call, as in
# agents/trainer/kernels/cudnn_attention.py.
_MAX_CUDNN_BYTES, _CUDNN_TOKENS = 288 << 20, 4096
# Extra rows in attention's scratch for each segment, beyond those of its tokens.
_SEGMENT_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Sizes of attention."""

    num: int
    """Number of query heads."""
    queries: int
    """Number of features of all queries."""
    keys: int
    """Number of features of all keys."""


def count_attention_scratch(
    heads: Heads, tokens: int, num_segments: int, num_multiprocessors: int
) -> int:
    """Return the scratch bytes of FlashAttention's backward pass.

    Its deterministic form keeps fp32 gradients of the queries apart for each group of key blocks,
    as many groups as fill the card (`flash_api.cpp`, `dq_accum`): multiprocessors divided by
    sequences times heads. With grouped-query attention each query head first gets its own
    gradients of keys and values. A sequence of 2,048 tokens of Llama-2-7B on a card of 46
    multiprocessors: 2 parts.

    >>> llama = Heads(num=32, queries=4096, keys=4096)
    >>> count_attention_scratch(llama, 2048, 1, 46) == 2 * 4 * 4096 * (2048 + 128) + 2048 * 128
    True
    """
    if not heads.num:
        return 0
    parts = max(1, math.ceil(num_multiprocessors / (num_segments * heads.num)))
    rows = tokens + _SEGMENT_ROWS * num_segments
    shared = 2 * 2 * heads.queries * tokens if heads.keys < heads.queries else 0
    return parts * 4 * heads.queries * rows + 4 * heads.num * tokens + shared


def count_cudnn_scratch(heads: Heads, tokens: int, num_segments: int) -> int:
    """Return the scratch bytes of one call of cuDNN's deterministic attention backward pass.

    It keeps a separate fp32 gradient of the queries for each block of 128 keys, so the trainer
    halves the sequences, then the heads, until a piece takes 288 MiB at most
    (`agents/trainer/kernels/cudnn_attention.py`). 0: even one key head is too large, and
    FlashAttention computes it. Two sequences of 2,048 tokens of Llama-2-7B take 256 MiB, one after
    the other:

    >>> llama = Heads(num=32, queries=4096, keys=4096)
    >>> count_cudnn_scratch(llama, 4096, 2) >> 20
    256
    """
    length = tokens // num_segments
    head_dim = heads.queries // heads.num
    num_keys = heads.keys // head_dim
    one_head = 4 * length * math.ceil(length / 128) * head_dim * (heads.num // num_keys)
    sequences, at_once = min(num_segments, max(1, _CUDNN_TOKENS // length)), num_keys
    while sequences * at_once * one_head > _MAX_CUDNN_BYTES:
        if sequences > 1:
            sequences = (sequences + 1) // 2
        elif at_once % 2 == 0:
            at_once //= 2
        else:
            return 0
    return sequences * at_once * one_head

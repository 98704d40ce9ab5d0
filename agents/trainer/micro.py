"""How a rank's slice of a batch is cut into pieces that fit its memory.

The cut moves no number but in the last digits: gradients are sums over tokens. Rows of like length
go together, so that little is padded, and the longest piece comes first, so that a card that is too
small shows it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CPU_TOKENS = 4096
"""More rows at once than this make a CPU no faster."""
MOST_TOKENS = 16384
_MEMORY_SHARE = 0.7
"""Of the free memory of a card; the rest is for what this estimate does not know."""
_BYTES_PER_LOGIT = 14
"""A logit in the model's precision, in fp32, its softmax and its gradient."""
_BYTES_PER_HIDDEN = 40
"""Activations kept per hidden value and layer: Korthikanti et al. 2022 (arXiv:2205.05198), 34
without the attention matrix, and some for the adapters."""


def group_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return micro-batches as lists of indices; each pads to at most `max_tokens`, or is one row.

    >>> group_rows([5, 9, 4, 8], max_tokens=18)
    [[1, 3], [0, 2]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def estimate_tokens(config: Any, free_bytes: int, longest: int) -> int:
    """Return how many tokens a card with `free_bytes` can train at once, at least `longest`.

    Llama-2-7B (32 layers, 4096 wide, 32000 words) needs about 5.7 MB per token.
    """
    hidden = int(getattr(config, "hidden_size", 4096))
    layers = int(getattr(config, "num_hidden_layers", 32))
    words = int(getattr(config, "vocab_size", 32000))
    token_bytes = hidden * layers * _BYTES_PER_HIDDEN + words * _BYTES_PER_LOGIT
    fitting = int(free_bytes * _MEMORY_SHARE) // token_bytes
    return max(longest, min(fitting, MOST_TOKENS))

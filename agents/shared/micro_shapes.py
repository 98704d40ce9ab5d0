"""Divide rows into micro-batches, and round their sizes to a few that repeat.

The trainer computes the micro-batches and the planner forecasts their cost, both with this module.

A GPU that replays a recorded micro-batch needs no host to launch thousands of kernels, but can
replay only micro-batches of one shape. So they are filled as far as rows allow, and padded to
one of a few sizes: eighths of the capacity. If the card is the bottleneck anyway, padding would
only cost time, so every micro-batch keeps its own size.

Shape letters: M tokens of a micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

SIZE_STEP = 64
"""Unit of sizes on GPUs, in tokens: a multiple of the tile sizes of matrix products."""
_NUM_SIZES = 8
"""Number of distinct sizes up to the capacity."""


def group_examples(
    num_tokens: Sequence[int], max_tokens: int, *, is_filled: bool = False
) -> list[list[int]]:
    """Return micro-batches as lists of indices, each with at most `max_tokens` or one example.

    First fit with the longest examples first (Johnson 1973) gives their number: at most 11/9 of the
    fewest possible. They are then filled evenly, the emptiest first (Graham 1969), as a small one
    would leave the card half idle. A card that is too small then fails at once.

    Args:
        num_tokens: Tokens of each example.
        max_tokens: Capacity of a micro-batch.
        is_filled: Keep the groups of first fit: all but the last ones are nearly full, so they need
        little padding; see `round_size`.

    >>> group_examples([5, 9, 4, 8], max_tokens=13)
    [[1, 2], [3, 0]]
    >>> [len(group) for group in group_examples([1] * 16, max_tokens=3)]
    [3, 3, 3, 3, 2, 2]
    >>> [len(group) for group in group_examples([1] * 16, max_tokens=3, is_filled=True)]
    [3, 3, 3, 3, 3, 1]
    """
    # Ties by index, so that all ranks get one order.
    order = sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i))
    first = _fit_first(num_tokens, order, max_tokens)
    if is_filled:
        return first
    groups: list[list[int]] = [[] for _ in first]
    heap = [(0, place) for place in range(len(first))]
    for index in order:
        filled, place = heap[0]
        if groups[place] and filled + num_tokens[index] > max_tokens:
            return first  # the emptiest group has no room, so an even distribution fails
        groups[place].append(index)
        heapq.heapreplace(heap, (filled + num_tokens[index], place))
    return groups


def _fit_first(num_tokens: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((p for p, left in enumerate(room) if num_tokens[index] <= left), len(groups))
        if place == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[place].append(index)
        room[place] -= num_tokens[index]
    return groups


def round_up_tokens(num_tokens: int) -> int:
    """Return the size to which a micro-batch without fixed sizes is padded on GPUs, in tokens.

    >>> [round_up_tokens(n) for n in (3, 100, 2048, 2049)]
    [64, 128, 2048, 2112]
    """
    return -(-num_tokens // SIZE_STEP) * SIZE_STEP


def round_size(num_tokens: int, capacity: int) -> int:
    """Return the fixed size to which a micro-batch is padded, in tokens.

    Args:
        num_tokens: Tokens of its rows.
        capacity: Usual limit of a micro-batch, which a longer example exceeds.

    >>> [round_size(n, 4096) for n in (40, 1000, 3600, 4096, 5000)]
    [512, 1024, 4096, 4096, 5120]
    """
    step = round_up_tokens(-(-round_up_tokens(capacity) // _NUM_SIZES))
    size = -(-num_tokens // step) * step
    # The last eighth may be a little shorter than the others.
    return min(size, round_up_tokens(capacity)) if num_tokens <= capacity else size


def find_size(lengths: Sequence[int], capacity: int, longest: int) -> int:
    """Return the fixed size of a micro-batch of these rows, in tokens.

    If all rows have the maximum length, they fill micro-batches evenly and need no padding.

    Args:
        lengths: Tokens of each row.
        capacity: Usual limit of a micro-batch, in tokens.
        longest: Length that no row exceeds, a multiple of `SIZE_STEP`.

    >>> find_size([1024, 1024, 1024], 4096, 1024), find_size([1024, 1000], 4096, 1024)
    (3072, 2048)
    """
    num_tokens = sum(lengths)
    return num_tokens if min(lengths) == longest else round_size(num_tokens, capacity)

"""Divide rows into micro-batches, and round their sizes to a few that repeat.

Shared by the trainer, which computes them, and the planner, which forecasts what they cost.

A GPU that replays a recorded micro-batch needs no host to launch thousands of kernels, but only
micro-batches of one shape can be replayed. So they are filled as far as rows allow, and padded to
one of a few sizes: eighths of the capacity. Where the card is the slower part anyway, padding
would only cost time, and every micro-batch keeps its own size.

Shape letters: M tokens of a micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

SIZE_STEP = 64
"""Sizes are multiples of this on GPUs: a multiple of the tile sizes of matrix products."""
_NUM_SIZES = 8
"""Number of sizes up to the capacity."""


def group_examples(
    num_tokens: Sequence[int], max_tokens: int, *, is_filled: bool = False
) -> list[list[int]]:
    """Return micro-batches as lists of indices; each has at most `max_tokens`, or is one example.

    Their number is that of first fit, the longest first (Johnson 1973): at most 11/9 of the fewest
    possible. They are then filled alike, the emptiest first (Graham 1969), as a small one would
    leave the card half idle. A card that is too small shows it at once.

    Args:
        num_tokens: Tokens of each example.
        max_tokens: Capacity of a micro-batch.
        is_filled: Keep the groups of first fit: all but the last ones are nearly full, so that
            little padding is needed; see `round_size`.

    >>> group_examples([5, 9, 4, 8], max_tokens=13)
    [[1, 2], [3, 0]]
    >>> [len(group) for group in group_examples([1] * 16, max_tokens=3)]
    [3, 3, 3, 3, 2, 2]
    >>> [len(group) for group in group_examples([1] * 16, max_tokens=3, is_filled=True)]
    [3, 3, 3, 3, 3, 1]
    """
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
    """Return the size that a micro-batch of its own size is padded to on GPUs.

    >>> [round_up_tokens(n) for n in (3, 100, 2048, 2049)]
    [64, 128, 2048, 2112]
    """
    return -(-num_tokens // SIZE_STEP) * SIZE_STEP


def round_size(num_tokens: int, capacity: int) -> int:
    """Return the size, in tokens, to which a micro-batch is padded so that sizes repeat.

    Args:
        num_tokens: Tokens of its rows.
        capacity: Usual limit of a micro-batch; a longer example exceeds it.

    >>> [round_size(n, 4096) for n in (40, 1000, 3600, 4096, 5000)]
    [512, 1024, 4096, 4096, 5120]
    """
    step = round_up_tokens(-(-round_up_tokens(capacity) // _NUM_SIZES))
    size = -(-num_tokens // step) * step
    # The last eighth may be a little shorter than the others.
    return min(size, round_up_tokens(capacity)) if num_tokens <= capacity else size


def find_size(lengths: Sequence[int], capacity: int, longest: int) -> int:
    """Return the size of a micro-batch of these rows that repeats, in tokens.

    Rows that all have the greatest length fill micro-batches alike, and need no padding.

    Args:
        lengths: Tokens of each row.
        capacity: Usual limit of a micro-batch, in tokens.
        longest: Length that no row exceeds, a multiple of `SIZE_STEP`.

    >>> find_size([1024, 1024, 1024], 4096, 1024), find_size([1024, 1000], 4096, 1024)
    (3072, 2048)
    """
    num_tokens = sum(lengths)
    return num_tokens if min(lengths) == longest else round_size(num_tokens, capacity)

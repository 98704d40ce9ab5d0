"""Statistics that the ranks exchange once per step: named numbers in one small float64 all-reduce.

A *sum* is added over the ranks. A *per-rank* number has a slot for every rank; each rank fills its
own and leaves zeros elsewhere, so the same sum distributes all of them exactly. Values may be
tensors on the device: filling never waits for a GPU. Reading does, once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = float | Tensor


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of one step, known to every rank after the all-reduce."""

    sums: dict[str, float]
    per_rank: dict[str, tuple[float, ...]]
    local: tuple[float, ...]
    """Scalars of this rank alone, fetched with the same wait; see `StatsLayout.read`."""


class StatsLayout:
    """Position of each number in the vector; the same on all ranks."""

    def __init__(
        self, *, sums: Sequence[str], per_rank: Sequence[str], rank: int, world_size: int
    ) -> None:
        self._sums = tuple(sums)
        self._per_rank = tuple(per_rank)
        self._rank = rank
        self._world_size = world_size

    def fill(self, values: Mapping[str, Value], device: torch.device) -> Tensor:
        """Return this rank's vector (S,), float64 on the device; a missing name counts as 0.

        Raises:
            KeyError: a name is not in the layout.
        """
        places = {name: place for place, name in enumerate(self._sums)}
        first = len(self._sums) + self._rank
        for place, name in enumerate(self._per_rank):
            places[name] = first + place * self._world_size
        numbers = [0.0] * (len(self._sums) + len(self._per_rank) * self._world_size)
        later: list[tuple[int, Tensor]] = []
        for name, value in values.items():
            if isinstance(value, Tensor):
                later.append((places[name], value))
            else:
                numbers[places[name]] = float(value)
        # One copy to the device for all plain numbers; the others are there already.
        vector_S = torch.tensor(numbers, dtype=torch.float64).to(device)
        for place, tensor in later:
            vector_S[place] = tensor
        return vector_S

    def read(self, vector_S: Tensor, *local: Tensor) -> Stats:
        """Return the numbers of the summed vector, and `local` scalars with the same wait."""
        extra = [value.detach().double().reshape(1) for value in local]
        # One transfer for everything: each one would wait for the GPU.
        numbers = torch.cat([vector_S, *extra]).tolist()
        start = len(self._sums)
        per_rank = {}
        for name in self._per_rank:
            per_rank[name] = tuple(numbers[start : start + self._world_size])
            start += self._world_size
        # Not strict, since the per-rank numbers follow.
        sums = dict(zip(self._sums, numbers, strict=False))
        return Stats(sums, per_rank, tuple(numbers[start:]))

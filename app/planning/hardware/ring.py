"""Find the order of PCs in which the slowest link between neighbours costs the least.

A ring waits in each of its steps for its slowest link, and a chain for the slowest transfer. Both
are bottleneck paths, found by dynamic programming over sets of PCs.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.planning.hardware.cluster import Cluster

MAX_EXACT = 10
"""Maximum number of PCs for which every order is compared; larger sets are searched greedily."""
# A chunk by which links are compared: latency counts little for gradients of megabytes.
_CHUNK_BYTES = 4e6
_NEVER = float("inf")


def link_s(cluster: Cluster, one: str, other: str) -> float:
    """Return the seconds in which a link carries a chunk, the measure of all orders."""
    link = cluster.link(one, other)
    return _CHUNK_BYTES / link.bytes_per_s + link.latency_s / 2


class Orders:
    """Best orders of the PCs of a cluster, computed once for all subsets."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        # By name, so that the order of a file decides nothing. PCs behind one uplink follow each
        # other, so that of equal orders one that crosses it least is found first.
        behind = {n: [n in uplink.nodes for uplink in cluster.uplinks] for n in names}
        self._names = tuple(sorted(names, key=lambda name: (behind[name], name)))
        self._places = {name: place for place, name in enumerate(self._names)}
        self._costs = [
            [link_s(cluster, one, other) if one != other else 0.0 for other in self._names]
            for one in self._names
        ]
        every = {cost for i, row in enumerate(self._costs) for cost in row[i + 1 :]}
        self.is_uniform = len(every) <= 1
        """True if all links are equal, so that no order is better than another."""
        self._rings: dict[frozenset[str], tuple[tuple[str, ...], float]] = {}
        self._paths: dict[frozenset[str], tuple[str, ...]] = {}

    def ring(self, names: frozenset[str]) -> tuple[tuple[str, ...], float]:
        """Return the best ring of some PCs, from the first name on, and its slowest link's cost."""
        if names not in self._rings:
            self._rings[names] = self._search_ring(names)
        return self._rings[names]

    def path(self, names: frozenset[str]) -> tuple[str, ...]:
        """Return the chain of some PCs whose slowest link is the fastest."""
        if names not in self._paths:
            places = sorted(self._places[name] for name in names)
            found = places if self.is_uniform else _search(self._costs, places, closed=False)
            self._paths[names] = tuple(self._names[place] for place in found)
        return self._paths[names]

    def _search_ring(self, names: frozenset[str]) -> tuple[tuple[str, ...], float]:
        places = sorted(self._places[name] for name in names)
        if len(places) < 2:
            return tuple(names), 0.0
        found = places if self.is_uniform else _search(self._costs, places, closed=True)
        slowest = max(
            self._costs[one][other]
            for one, other in zip(found, [*found[1:], found[0]], strict=True)
        )
        return tuple(self._names[place] for place in found), slowest


def _search(costs: Sequence[Sequence[float]], places: list[int], *, closed: bool) -> list[int]:
    """Return the order with the least largest cost; closed: from the last back to the first.

    >>> fast, slow = 1.0, 9.0
    >>> costs = [[0, slow, fast, fast], [slow, 0, fast, fast], [fast, fast, 0, slow],
    ...     [fast, fast, slow, 0]]
    >>> _search(costs, [0, 1, 2, 3], closed=True)
    [0, 3, 1, 2]
    """
    if len(places) <= (3 if closed else 1):
        return places
    if len(places) > MAX_EXACT:
        return _search_greedily(costs, places)
    bounds = sorted({costs[one][other] for one in places for other in places if one != other})
    low, high = 0, len(bounds) - 1
    found = places
    while low <= high:
        middle = (low + high) // 2
        order = _walk(costs, places, bounds[middle], closed=closed)
        if order is None:
            low = middle + 1
        else:
            found, high = order, middle - 1
    return found


def _walk(
    costs: Sequence[Sequence[float]], places: list[int], most: float, *, closed: bool
) -> list[int] | None:
    """Return a way through all places over links that cost at most `most`, or None."""
    num = len(places)
    near = [
        sum(1 << j for j in range(num) if j != i and costs[places[i]][places[j]] <= most)
        for i in range(num)
    ]
    # Bits of the places at which a walk over each set of places may end (Held and Karp 1962).
    ends = [0] * (1 << num)
    for start in (0,) if closed else range(num):
        ends[1 << start] = 1 << start
    for seen in range(1, 1 << num):
        last = ends[seen]
        while last:
            bit = last & -last
            last ^= bit
            further = near[bit.bit_length() - 1] & ~seen
            while further:
                step = further & -further
                further ^= step
                ends[seen | step] |= step
    seen = (1 << num) - 1
    last = ends[seen] & (near[0] if closed else seen)
    order: list[int] = []
    while last:
        bit = last & -last
        order.append(bit.bit_length() - 1)
        seen ^= bit
        last = ends[seen] & near[order[-1]]
    return [places[place] for place in reversed(order)] if len(order) == num else None


def _search_greedily(costs: Sequence[Sequence[float]], places: list[int]) -> list[int]:
    """Return a good order: always on to the nearest place, from the best start."""
    best: tuple[float, float, list[int]] = (_NEVER, _NEVER, places)
    for start in places:
        order, left = [start], [place for place in places if place != start]
        while left:
            nearest = min(left, key=lambda place: (costs[order[-1]][place], place))
            left.remove(nearest)
            order.append(nearest)
        hops = [costs[one][other] for one, other in zip(order, [*order[1:], start], strict=True)]
        best = min(best, (max(hops), sum(hops), order))
    return best[2]

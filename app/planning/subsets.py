"""Choose subsets of the nodes by an estimate that takes microseconds per subset.

A step takes about as long as all tokens at the summed speed, plus the part of the gradient
exchange on the slowest link of the ring that the last backward pass does not hide. Only the best
few subsets are computed in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from app.planning.hardware.cluster import LinkSpeed
from app.planning.hardware.network import gradient_bytes, hide, ring_s
from app.planning.plan_context import Case

MAX_NODES = 10
"""Number of nodes up to which every subset is rated (1,023); with more, only the N fastest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """Contribution of one node."""

    name: str
    tokens_per_s: float
    num_gpus: int
    last_s: float
    """Duration of its shortest micro-batch, in seconds."""


def choose_subsets(case: Case, num: int) -> list[tuple[str, ...]]:
    """Return up to `num` subsets of the nodes in which every GPU fits, the best first."""
    found = [_prospect(case, node.name) for node in case.cluster.nodes]
    return rank_subsets(case, [one for one in found if one is not None], num)


def rank_subsets(case: Case, prospects: list[Prospect], num: int) -> list[tuple[str, ...]]:
    """Return up to `num` subsets of these nodes, the best first.

    Args:
        case: the prepared request.
        prospects: nodes that can take part, in the order of the cluster.
        num: maximum number of subsets.
    """
    # Looked up once: 1,023 subsets would ask for each link hundreds of times.
    links = {
        (a.name, b.name): case.cluster.link(a.name, b.name)
        for a in prospects
        for b in prospects
        if a is not b
    }
    num_bytes = gradient_bytes(case.shape, case.spec) * case.network_factor
    weighed = [
        (_estimate_s(case, some, links, num_bytes), len(some), [prospect.name for prospect in some])
        for some in _subsets(prospects)
    ]
    # Ties go to fewer nodes, then to names, so that the order is deterministic.
    return [tuple(names) for _, _, names in sorted(weighed)[:num]]


def fastest_together(case: Case) -> Iterator[tuple[str, ...]]:
    """Yield the fastest node, the two fastest, and so on, each set in the order of the cluster."""
    names = [node.name for node in case.cluster.nodes if case.of((node.name,))]
    speeds = {name: sum(1 / one.pace.token_s for one in case.of((name,))) for name in names}
    fastest = sorted(names, key=lambda name: -speeds[name])
    for size in range(1, len(names) + 1):
        yield tuple(name for name in names if name in fastest[:size])


def _subsets(prospects: list[Prospect]) -> Iterator[tuple[Prospect, ...]]:
    if len(prospects) <= MAX_NODES:
        for size in range(1, len(prospects) + 1):
            yield from combinations(prospects, size)
        return
    fastest = sorted(prospects, key=lambda one: -one.tokens_per_s)
    for size in range(1, len(prospects) + 1):
        chosen = fastest[:size]
        yield tuple(prospect for prospect in prospects if prospect in chosen)


def _prospect(case: Case, name: str) -> Prospect | None:
    workers = case.of((name,))
    fits = [case.fit(worker, 1) for worker in workers]
    if not workers or not all(fit.fits for fit in fits):
        return None
    both = list(zip(workers, fits, strict=True))
    speeds = [worker.pace.tokens_per_s(fit.setting, case.rows) for worker, fit in both]
    return Prospect(
        name=name,
        tokens_per_s=sum(speeds),
        num_gpus=len(workers),
        last_s=min(fit.setting.micro_tokens / v for (_, fit), v in zip(both, speeds, strict=True)),
    )


def _estimate_s(
    case: Case,
    some: tuple[Prospect, ...],
    links: dict[tuple[str, str], LinkSpeed],
    num_bytes: float,
) -> float:
    step_s = case.step_tokens / sum(prospect.tokens_per_s for prospect in some)
    if len(some) < 2:
        return step_s
    # At place 0 the index is -1: the last node closes the ring.
    ring = [links[some[place - 1].name, one.name] for place, one in enumerate(some)]
    slowest = min(ring, key=lambda link: link.bytes_per_s)
    reduce_s = ring_s(num_bytes, slowest, sum(prospect.num_gpus for prospect in some))
    return step_s + hide(reduce_s, min(prospect.last_s for prospect in some))

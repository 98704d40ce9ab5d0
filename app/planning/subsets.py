"""Choose the GPUs of a plan: bound every team cheaply, then compute those that may be the fastest.

A step takes about as long as all tokens at the summed speed, plus the part of the gradient exchange
on the slowest link that the last backward pass does not hide. Whole sequences are dealt out as the
trainer does, so the estimate is within a few percent of the full forecast and hardly ever above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from app.planning.candidate import Candidate
from app.planning.hardware.network import gradient_bytes, hide, ring_s
from app.planning.hardware.ring import link_s
from app.planning.plan_context import Case, Worker
from app.planning.split import split_rows

Team = tuple[Worker, ...]
Rate = Callable[[Worker, int], tuple[float, float] | None]
"""Returns a GPU's tokens per second and the seconds of its shortest micro-batch in a team of a
number of GPUs; None: it cannot take part."""

# Number of teams up to which all are bounded; with more, the fastest GPUs and their neighbours.
_MAX_TEAMS = 1100
# Number of GPUs up to which every team that may win is computed, and the limit beyond.
_EXHAUSTIVE_GPUS, _MAX_COMPUTED = 6, 24
# Number of PCs up to which the ring of every team is searched.
_EXACT_RINGS = 7
# A forecast may be this much below the estimate of its team, as a share.
_SLACK = 0.02


def list_teams(case: Case, able: Iterable[Worker]) -> list[Team]:
    """Return the teams worth a comparison, each GPU with its part of its PC's RAM.

    Of the GPUs of one PC the fastest come first, and of equal PCs on equal links any.
    """
    nodes: dict[str, list[Worker]] = {}
    for worker in able:
        nodes.setdefault(worker.node.name, []).append(worker)
    parts = [_list_parts(workers) for workers in nodes.values()]
    if prod(len(one) for one in parts) <= _MAX_TEAMS:
        teams: Iterator[Team] = (sum(some, ()) for some in product(*parts))
    else:
        teams = _near_fastest([worker for workers in nodes.values() for worker in workers])
    if not case.orders.is_uniform:
        return [team for team in teams if team]
    numbers: dict[tuple[object, ...], int] = {}
    found: dict[tuple[tuple[int, ...], ...], Team] = {}
    for team in teams:
        by_node: dict[str, list[int]] = {}
        for worker in team:
            kind = numbers.setdefault(worker.like, len(numbers))
            by_node.setdefault(worker.node.name, []).append(kind)
        if team:
            found.setdefault(tuple(sorted(map(tuple, by_node.values()))), team)
    return list(found.values())


def _list_parts(workers: list[Worker]) -> list[Team]:
    """Return the GPUs of one PC that may take part together: none, the fastest, the two fastest."""
    fastest = sorted(workers, key=lambda one: (one.pace.token_s, one.gpu.device))
    return [
        tuple(replace(one, num_sharing=num) for one in workers if one in fastest[:num])
        for num in range(len(workers) + 1)
    ]


def _near_fastest(workers: list[Worker]) -> Iterator[Team]:
    """Yield the fastest GPUs, from one to all, and each of these teams without one of them."""
    fastest = sorted(workers, key=lambda one: (one.pace.token_s, one.place))
    for num in range(1, len(fastest) + 1):
        for left_out in (None, *fastest[: num - 1]):
            some = [one for one in workers if one in fastest[:num] and one is not left_out]
            yield tuple(
                replace(one, num_sharing=sum(o.node.name == one.node.name for o in some))
                for one in some
            )


def remember(rate: Rate) -> Rate:
    """Return a rate that is computed once per GPU, its PC's sharing GPUs and number of ranks."""
    known: dict[tuple[object, ...], tuple[float, float] | None] = {}

    def find(worker: Worker, num: int) -> tuple[float, float] | None:
        key = (worker.place, worker.num_sharing, num)
        if key not in known:
            known[key] = rate(worker, num)
        return known[key]

    return find


def estimate_teams(case: Case, teams: Iterable[Team], rate: Rate) -> list[tuple[float, Team]]:
    """Return teams of two GPUs or more with the seconds of their step, the fastest first."""
    num_bytes = gradient_bytes(case.shape, case.spec) * case.network_factor
    found = []
    for team in teams:
        rates = [rate(worker, len(team)) for worker in team] if len(team) > 1 else [None]
        known = [one for one in rates if one is not None]
        if len(known) == len(rates):
            found.append((_estimate_s(case, team, known, num_bytes), team))
    # Ties go to fewer GPUs, then to names, so that the order is deterministic.
    return sorted(found, key=lambda one: (one[0], len(one[1]), [w.place for w in one[1]]))


def _estimate_s(
    case: Case, team: Team, rates: Sequence[tuple[float, float]], num_bytes: float
) -> float:
    speeds = [speed for speed, _ in rates]
    rows = split_rows(case.spec.batch_sequences, speeds)
    step_s = max(num * case.mean_tokens / v for num, v in zip(rows, speeds, strict=True))
    names = list(dict.fromkeys(worker.node.name for worker in team))
    link = case.ring(team) if len(names) == 1 else case.cluster.link(*_find_bound(case, names))
    reduce_s = ring_s(num_bytes, link, len(team))
    return step_s + hide(reduce_s, min(last_s for _, last_s in rates))


def _find_bound(case: Case, names: list[str]) -> tuple[str, str]:
    """Return a link that is at least as fast as the slowest one of the best ring."""
    if case.orders.is_uniform or len(names) < 3:
        return names[0], names[1]
    if len(case.cluster.nodes) <= _EXACT_RINGS:
        ring = case.orders.ring(frozenset(names))[0]
        pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
        return max(pairs, key=lambda pair: link_s(case.cluster, *pair))
    # Each PC has two neighbours in a ring, so its second best link bounds the ring.
    bounds = []
    for name in names:
        others = sorted((link_s(case.cluster, name, o), o) for o in names if o != name)
        bounds.append((others[1][0], name, others[1][1]))
    _, one, other = max(bounds)
    return one, other


def compute_best(
    case: Case,
    scored: Iterable[tuple[float, Team]],
    plan: Callable[[Team], Candidate | None],
    most: int = _MAX_COMPUTED,
) -> list[Candidate]:
    """Return the forecasts of the teams that may be the fastest, by an estimate of each.

    Args:
        case: the prepared request.
        scored: teams with the estimate or lower bound of a step in seconds, the lowest first.
        plan: returns the full forecast of a team.
        most: maximum number of full forecasts if there are more than a few GPUs.
    """
    if len(case.workers) <= _EXHAUSTIVE_GPUS:
        most = 1 << _EXHAUSTIVE_GPUS
    found: list[Candidate] = []
    best_s = float("inf")
    for estimate_s, team in scored:
        if len(found) >= most or estimate_s > best_s * (1 + _SLACK):
            break
        candidate = plan(case.team(team))
        if candidate is not None:
            found.append(candidate)
            best_s = min(best_s, candidate.step_s if candidate.fits else best_s)
    return found


def fastest_together(case: Case) -> Iterator[Team]:
    """Yield the fastest GPU, the two fastest, and so on."""
    fastest = sorted(case.workers, key=lambda one: (one.pace.token_s, one.place))
    for size in range(1, len(fastest) + 1):
        yield case.team(one for one in case.workers if one in fastest[:size])

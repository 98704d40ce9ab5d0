"""Plan many requests in little time: the whole search on few GPUs, some teams of it on more.

Each is a plan that the run could start with, though the whole search may find a faster one. So
comparisons of purchases or models err on the slow side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agents.contract.parallel import PARALLEL
from app.planning.build_context import open_case
from app.planning.candidate import Candidate, PlanRequest
from app.planning.choice import choose
from app.planning.memory.forecast import Fit
from app.planning.plan_context import Case, Worker
from app.planning.strategies.data_parallel import plan_data
from app.planning.strategies.registry import PLANNED_MODES, propose_candidates
from app.planning.subsets import fastest_together

# Number of GPUs up to which the whole search takes little time.
_MAX_SEARCHED = 3
# Numbers of GPUs of the teams that are tried on more.
_SIZES = (1, 2, 3, 5, 8)
Places = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Shared:
    """Results that requests share if they differ in their PCs only."""

    fits: dict[tuple[object, ...], Fit] = field(default_factory=dict)
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)


def plan_quickly(
    request: PlanRequest, likely: Iterable[Places] = (), shared: Shared | None = None
) -> Candidate | None:
    """Return a plan that fits, by the rules of `make_plan`, or None.

    Args:
        request: the run and the PCs.
        likely: GPUs that probably train together, by node and device; without them more are tried.
        shared: results of former requests.
    """
    case = open_case(request)
    if shared is not None:
        case = replace(case, fits=shared.fits, known=shared.known)
    if len(case.workers) <= _MAX_SEARCHED:
        found = propose_candidates(case)
    else:
        found = list(_propose_some(case, set(likely)))
    found.sort(key=lambda one: (not one.fits, one.step_s))
    return choose(request.spec, case.cluster, found)


def _propose_some(case: Case, likely: set[Places]) -> Iterator[Candidate]:
    """Yield the plans of the fastest GPUs and of likely teams."""
    named = [
        case.team(one for one in case.workers if one.place in places) for places in likely if places
    ]
    fastest = [team for team in fastest_together(case) if len(team) in (*_SIZES, len(case.workers))]
    whole = [_plan_whole(case, team) for team in (*fastest, *named) if team]
    yield from whole
    # A pipeline that beats a GPU with the whole model usually takes all GPUs.
    is_few = bool(named) or any(one.fits for one in whole)
    for team in (*fastest, *named):
        yield from _divide(case, team, with_stages=not is_few or team in (fastest[-1], *named))


def _plan_whole(case: Case, team: tuple[Worker, ...]) -> Candidate:
    return plan_data(case, team, mode="data" if len(team) > 1 else "single")


def _divide(case: Case, team: tuple[Worker, ...], *, with_stages: bool) -> Iterator[Candidate]:
    if any(worker.gpu.device == "cpu" for worker in team):
        return
    for name, row in PLANNED_MODES.items():
        one = row.divided
        if one is None or not PARALLEL[name].runnable or len(team) < one.min_gpus:
            continue
        if PARALLEL[name].has_stages and not with_stages:
            continue
        if one.refuse(case) or one.refuse_gpus(case, len(team)) or not one.screen(case)(team):
            continue
        candidate = one.plan(case, team)
        if candidate is not None:
            yield candidate

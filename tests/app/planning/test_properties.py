"""Properties of every plan, over random clusters and models.

Seeds come in two halves: plans are mended by looking at the even ones, and the odd ones tell
whether that helped in general. CI draws a few; all 3,000 take minutes:

    python -m pytest -m campaign tests/app/planning/test_properties.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from agents.contract.parallel import PARALLEL
from app.planning.candidate import Candidate, PlanRequest
from app.planning.choice import weigh
from app.planning.plan import make_plan
from tests.app.planning import random_clusters as draw

QUICK = range(0, 12, 2)
EVEN, ODD = range(0, 3000, 2), range(1, 3000, 2)
SLOWER = 1.01
"""Largest allowed ratio of times after a gain of hardware."""
HALVES = pytest.mark.parametrize("seeds", [
    pytest.param(QUICK, id="quick"),
    pytest.param(EVEN, id="even", marks=pytest.mark.campaign),
    pytest.param(ODD, id="odd", marks=pytest.mark.campaign),
])  # fmt: skip


def measure(chosen: Candidate | None) -> float:
    """Return the seconds by which `parallel: auto` compares: with the margins of divided models."""
    return math.inf if chosen is None else weigh(chosen)


def find_slower(
    seeds: range, change: Callable[[PlanRequest, int], PlanRequest], limit: float
) -> list[tuple[int, float]]:
    """Return the seeds whose plan is slower by more than `limit` after a change, with the ratio."""
    found = []
    for seed in seeds:
        request = draw.draw_request(seed)
        before = measure(make_plan(request).chosen)
        chosen = make_plan(change(request, seed)).chosen
        # A batch is cut at whole sequences, as the trainer does, so one more may fall to a GPU.
        spare_s = 0.0 if chosen is None else _last_sequence_s(request, chosen)
        if measure(chosen) > limit * before + spare_s:
            found.append((seed, measure(chosen) / before))
    return found


def _last_sequence_s(request: PlanRequest, chosen: Candidate) -> float:
    """Return the seconds that the slowest GPU of a shared batch needs for one sequence."""
    if not PARALLEL[chosen.mode].copies_model:
        return 0.0
    assert request.data.mean_tokens is not None
    return request.data.mean_tokens / min(gpu.tokens_per_s for gpu in chosen.gpus)


@HALVES
def test_the_order_of_pcs_changes_nothing(seeds: range) -> None:
    for seed in seeds:
        request = draw.draw_request(seed)
        one, other = make_plan(request), make_plan(draw.shuffle(request, seed))
        assert one.id == other.id, seed
        assert one.chosen == other.chosen, seed
        assert one.refused == other.refused, seed


@HALVES
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda request, seed: draw.give_memory(request, 8), id="memory"),
        pytest.param(lambda request, seed: draw.speed_up_links(request, 2.0), id="links"),
        pytest.param(draw.add_gpu, id="gpu"),
        pytest.param(draw.add_pc, id="pc"),
    ],
)
def test_more_hardware_is_never_slower(
    seeds: range, change: Callable[[PlanRequest, int], PlanRequest]
) -> None:
    assert find_slower(seeds, change, SLOWER) == []


@HALVES
def test_every_mode_that_is_missing_names_the_key_that_forbids_it(seeds: range) -> None:
    for seed in seeds:
        request = draw.draw_request(seed)
        plan = make_plan(request)
        num_gpus = sum(len(node.gpus) for node in request.cluster.nodes)
        shown = {one.mode for one in (plan.chosen, *plan.others) if one is not None}
        refused = {one.mode: one.keys for one in plan.refused}
        needs = {need.key for need in PARALLEL["pipeline"].needs}
        if num_gpus > 1:
            assert "pipeline" in shown or set(refused["pipeline"]) <= {*needs, "model"}, seed
            assert "data" in shown, seed
        if request.spec.adapter.kind == "full":
            assert "adapter.kind" in refused["streamed"], seed
        for mode, keys in refused.items():
            assert keys, (seed, mode)
            assert mode not in shown, (seed, mode)


@HALVES
def test_auto_is_as_fast_as_the_best_of_all_teams(seeds: range) -> None:
    for seed in seeds[::3]:
        request = draw.draw_request(seed, most_gpus=4)
        best = min(measure(make_plan(team).chosen) for team in _list_every_team(request))
        assert measure(make_plan(request).chosen) <= 1.02 * best, seed


def _list_every_team(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield the request with each set of GPUs as a demand."""
    places = [(node.name, gpu.device) for node in request.cluster.nodes for gpu in node.gpus]
    for size in range(1, len(places) + 1):
        for some in combinations(places, size):
            entries = tuple(f"{name}:{device.removeprefix('cuda:')}" for name, device in some)
            yield replace(request, spec=replace(request.spec, nodes=entries))

"""Models that fit PCs, with time and cost, and settings that keep a deadline or budget."""

from __future__ import annotations

import pytest

from agents.contract.spec import DataSpec, RunSpec
from app.library.cluster_file import parse_cluster
from app.library.configs import read_known
from app.planning.best import BestLimits, FittingModel, find_fitting
from app.planning.candidate import DataSize, PlanRequest
from app.planning.shape.model_shape import read_shape

NAMES = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B", "meta-llama/Llama-3.1-70B")
SHAPES = {
    name: read_shape(entry["config"])
    for entry in read_known()
    for name in entry["names"]
    if name in NAMES
}
PC = parse_cluster("nodes: [{name: pc, gpus: [RTX 4090], ram_gib: 32}]")
HOUR_S = 3600.0


def find(limits: BestLimits, num_rows: int | None = 5000) -> dict[str, FittingModel]:
    request = PlanRequest(
        spec=RunSpec(model="-", data=DataSpec(train="t")),
        shape=SHAPES[NAMES[0]],
        data=DataSize(num_rows=num_rows, mean_tokens=345.0 if num_rows else None),
        cluster=PC,
    )
    found = find_fitting(request, SHAPES.items(), limits)
    return {one.model: one for one in found}


def test_models_are_listed_with_time_and_cost_the_largest_first() -> None:
    found = find(BestLimits(price_per_kwh=0.4))

    sizes = [one.num_parameters for one in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    # LoRA where it fits, as it rounds no weights; 14B needs 28 GB for it.
    assert (found[NAMES[1]].adapter, found[NAMES[2]].adapter) == ("lora", "qlora")
    for one in found.values():
        assert one.is_whole
        assert one.total_s == one.candidate.total_s
        assert one.cost == pytest.approx((one.energy_wh or 0) / 1000 * 0.4)


def test_a_deadline_shortens_a_run_or_excludes_it() -> None:
    every = find(BestLimits())
    limit_s = 0.5 * (every[NAMES[2]].total_s or 0)

    found = find(BestLimits(seconds=limit_s))

    assert found[NAMES[0]].is_whole
    part = found[NAMES[2]]
    assert not part.is_whole
    assert "max_steps" in part.change
    assert all((one.total_s or 0) <= limit_s for one in found.values())
    # Models that see all data come before those that do not.
    shown = [one.is_whole for one in found.values()]
    assert shown == sorted(shown, reverse=True)


def test_a_model_that_would_see_less_than_a_twentieth_of_the_data_is_left_out() -> None:
    largest = find(BestLimits())[NAMES[3]]

    found = find(BestLimits(seconds=0.04 * (largest.total_s or 0)))

    assert NAMES[3] not in found
    assert NAMES[0] in found


def test_a_budget_shortens_a_run_in_the_same_way() -> None:
    every = find(BestLimits(price_per_kwh=0.4))
    budget = 0.5 * (every[NAMES[2]].cost or 0)

    found = find(BestLimits(budget=budget, price_per_kwh=0.4))

    assert all((one.cost or 0) <= budget for one in found.values())
    assert not found[NAMES[2]].is_whole


def test_without_a_number_of_rows_times_are_not_known() -> None:
    found = find(BestLimits(seconds=HOUR_S), num_rows=None)

    assert set(found) == set(NAMES)
    assert {(one.total_s, one.share) for one in found.values()} == {(None, None)}

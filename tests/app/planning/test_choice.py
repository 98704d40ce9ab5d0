"""What `parallel: auto` takes where several ways fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.build_context import open_case
from app.planning.candidate import Candidate, StepParts
from app.planning.choice import MARGIN, find_least, weigh
from app.planning.hardware.cluster import ethernet
from app.planning.plan import make_plan
from app.planning.strategies.weight_streaming import plan_streamed
from app.presentation.plan_text import describe_plan
from tests.app.planning.clusters import ask, example, make_pcs


@pytest.fixture(scope="module")
def ways() -> dict[str, Candidate]:
    """One candidate of each way, on GPUs."""
    plan = make_plan(ask(example("three-mismatched"), "13B"))
    assert plan.chosen is not None
    return {one.mode: one for one in (*plan.others[::-1], plan.chosen)}


def lasting(candidate: Candidate, step_s: float) -> Candidate:
    return replace(candidate, parts_s=StepParts(compute_s=step_s))


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"single": 100, "streamed": 90}, "single"),
        ({"single": 100, "streamed": 80}, "streamed"),
        ({"single": 100, "pipeline": 80}, "single"),
        ({"single": 100, "pipeline": 70}, "pipeline"),
        ({"streamed": 100, "pipeline": 90}, "streamed"),
        ({"streamed": 100, "pipeline": 80}, "pipeline"),
        ({"single": 120, "streamed": 100, "pipeline": 95}, "streamed"),
        # Passes are so short that what the host does between them may be longer.
        ({"single": 0.3, "streamed": 0.2}, "single"),
    ],
)
def test_a_way_that_divides_the_model_wins_by_a_margin(
    ways: dict[str, Candidate], seconds: dict[str, float], best: str
) -> None:
    found = find_least(lasting(ways[mode], time_s) for mode, time_s in seconds.items())

    assert found is not None
    assert found.mode == best


def test_a_model_that_fits_is_not_divided_on_a_cpu(ways: dict[str, Candidate]) -> None:
    single, pipeline = lasting(ways["single"], 100), lasting(ways["pipeline"], 10)
    on_cpu = replace(pipeline, gpus=tuple(replace(gpu, device="cpu") for gpu in pipeline.gpus))

    assert find_least((single, pipeline)) is pipeline
    assert find_least((single, on_cpu)) is single
    assert find_least((on_cpu,)) is on_cpu


def test_13b_on_three_unlike_pcs_streams_and_says_by_how_much_it_is_faster() -> None:
    """Only one of the cards holds the model, and the two others are worth more."""
    plan = make_plan(ask(example("three-mismatched"), "13B"))

    assert plan.chosen is not None
    assert (plan.chosen.mode, len(plan.chosen.gpus)) == ("streamed", 3)
    (alone,) = (one for one in plan.others if one.mode == "single" and one.fits)
    assert alone.step_s > (1 + MARGIN) * plan.chosen.step_s
    assert "1.2 times as fast as alpha alone, by more than forecasts may be off" in (
        plan.chosen.reason
    )


def test_a_faster_way_that_was_not_chosen_says_why() -> None:
    plan = make_plan(ask(example("seven-4070"), kind="lora"))

    assert plan.chosen is not None
    assert plan.chosen.mode == "streamed"
    (pipeline, *_) = (one for one in plan.others if one.mode == "pipeline" and one.fits)
    assert pipeline.step_s < plan.chosen.step_s
    assert weigh(pipeline) > weigh(plan.chosen)
    assert "by less than forecasts may be off, and a lost node stops it" in pipeline.reason


def test_streaming_leaves_out_a_node_whose_link_costs_more_than_it_computes() -> None:
    cluster = make_pcs("RTX 4090", "RTX 4070", "RTX 3080", gbit_per_s=2.5)
    slow = {frozenset((name, "pc3")): ethernet(0.05, 0.004) for name in ("pc1", "pc2")}
    request = ask(replace(cluster, links=slow), "70B", sequence_tokens=512, parallel="streamed")
    plan = make_plan(request)

    assert plan.chosen is not None
    assert plan.chosen.nodes == ("pc1", "pc2")
    everywhere = plan_streamed(open_case(request), open_case(request).workers)
    assert everywhere is not None
    assert everywhere.fits
    assert everywhere.step_s > 1.1 * plan.chosen.step_s


def test_a_plan_among_all_nodes_takes_the_best_and_one_of_listed_nodes_takes_all() -> None:
    too_large = ask(example("three-mismatched"), "70B", batch_sequences=64)
    plan = make_plan(too_large)

    assert plan.chosen is not None
    assert plan.chosen.nodes == ("alpha",)
    slow = ask(make_pcs("RTX 4090", "RTX 3060", gbit_per_s=0.05), "7B")
    alone = make_plan(slow)
    assert alone.chosen is not None
    assert alone.chosen.nodes == ("pc1",)
    assert "times as fast as all GPUs together" in alone.chosen.reason
    listed = make_plan(replace(slow, spec=replace(slow.spec, nodes=("pc1", "pc2"))))
    assert listed.chosen is not None
    assert listed.chosen.nodes == ("pc1", "pc2")
    assert [one.change["nodes"] for one in listed.advice if "nodes" in one.change] == [("pc1",)]


def test_a_plan_says_whether_nothing_fits_or_only_what_is_asked_for() -> None:
    pcs = make_pcs("RTX 4090", "RTX 3070 Ti")
    alone = make_plan(ask(make_pcs("RTX 4090"), parallel="pipeline"))
    nothing = make_plan(ask(pcs, "70B", parallel="data"))

    assert (alone.chosen, nothing.chosen) == (None, None)
    said = describe_plan(alone)
    assert said.startswith("No plan fits the requested mode and nodes. pc1 alone: fits")
    assert describe_plan(nothing).startswith("No plan fits these settings. ")

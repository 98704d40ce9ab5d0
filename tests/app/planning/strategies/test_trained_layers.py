"""Every stage of a planned pipeline has something to train, or the plan says what to change."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from app.planning.cut import find_absence
from app.planning.hardware.cluster import Cluster
from app.planning.plan import make_plan
from app.planning.strategies.trained_layers import give_each_stage_one
from tests.app.planning.clusters import ask, example, make_pcs
from tests.draws import seed

THREE = make_pcs(*["RTX 4070"] * 3)


def ask_for(targets, cluster: Cluster = THREE, num_layers: int = 32, **changes):
    request = ask(cluster, parallel="pipeline", **changes)
    adapter = replace(request.spec.adapter, targets=targets)
    shape = replace(request.shape, layers=request.shape.layers[:num_layers])
    return replace(request, spec=replace(request.spec, adapter=adapter), shape=shape)


def test_ends_move_until_each_stage_has_a_trained_layer():
    chance = random.Random(seed(5))
    for _ in range(2000):
        num_layers = chance.randint(1, 12)
        trained = sorted(chance.sample(range(num_layers), chance.randint(0, num_layers)))
        num = chance.randint(1, num_layers)
        ends = [0, *sorted(chance.sample(range(1, num_layers), num - 1)), num_layers]
        counts = tuple(b - a for a, b in pairwise(ends))

        found = give_each_stage_one(counts, trained)

        if len(trained) < num:
            assert found is None
            continue
        assert found is not None
        assert sum(found) == num_layers
        moved = [0, *accumulate(found)]
        spans = list(pairwise(moved))
        assert all(any(first <= one < stop for one in trained) for first, stop in spans)
        if all(any(a <= one < b for one in trained) for a, b in pairwise(ends)):
            assert found == counts, "nothing moves without need"


def test_a_cut_follows_the_layers_that_are_trained():
    plan = make_plan(ask_for(r".*\.layers\.(29|3\d)\..*q_proj"))

    assert plan.chosen is not None
    chains = [gpu for gpu in plan.chosen.gpus if gpu.replica == 0]
    assert all(gpu.layers[1] > 29 for gpu in plan.chosen.gpus)
    assert all(gpu.memory.adapter_bytes > 0 for gpu in plan.chosen.gpus)
    assert chains[0].layers[0] == 0
    assert chains[-1].layers[1] == 32


@pytest.mark.parametrize(
    ("targets", "num_layers", "words"),
    [
        (r".*\.layers\.31\..*q_proj", 32, "adapter.targets gives one to layer 32 alone"),
        (("q_proj",), 1, "A model of one layer cannot be cut into stages"),
    ],
)
def test_a_pipeline_without_a_cut_is_refused_with_what_fits(targets, num_layers, words):
    request = ask_for(targets, num_layers=num_layers)
    plan = make_plan(request)

    assert plan.chosen is None
    assert any(words in one.text for one in plan.advice)
    problem = find_absence(request, plan.advice, 3)
    assert problem is not None
    assert words in problem[0]
    assert "parallel: " in problem[1]
    assert find_absence(request, plan.advice, 1) is None, "one GPU goes on alone"


def test_stages_are_refused_that_are_more_than_trained_layers():
    request = ask_for(r".*\.layers\.3[01]\..*q_proj")

    problem = find_absence(request, (), 3)

    assert problem is not None
    assert "3 GPUs are more than the 2 layers that have one" in problem[0]


def test_more_gpus_than_layers_form_several_pipelines():
    plan = make_plan(ask_for(("q_proj",), example("seven-4070"), num_layers=3, batch_sequences=64))

    assert plan.chosen is not None
    assert len(plan.chosen.gpus) == 7
    assert plan.chosen.num_replicas >= 3


def test_names_that_a_plan_does_not_know_refuse_nothing():
    request = ask_for(r"h\.3\.attn\.c_attn")

    assert find_absence(request, (), 3) is None
    assert make_plan(request).chosen is not None

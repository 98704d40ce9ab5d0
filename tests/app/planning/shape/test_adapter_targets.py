"""Targets of an adapter that mean some layers of a model and not others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.plan import make_plan
from app.planning.shape.adapter_targets import choose_targets
from app.planning.shape.model_parts import list_parts
from tests.app.planning.clusters import ask, llama, make_pcs

UPPER_HALF = r".*\.layers\.(1[6-9]|2\d|3[01])\.self_attn\.[qv]_proj"


@pytest.mark.parametrize(
    ("targets", "num_layers"),
    [
        (UPPER_HALF, 16),
        (("layers.31.self_attn.q_proj", "layers.31.self_attn.v_proj"), 1),
        (("self_attn.q_proj", "v_proj"), 32),
        ("([", 0),
    ],
)
def test_an_adapter_is_counted_in_the_layers_that_its_targets_mean(targets, num_layers):
    shape = llama("7B").tell_apart(targets)

    chosen = [[one.name for one in choose_targets(layer, targets)] for layer in shape.layers]

    assert chosen == [[]] * (32 - num_layers) + [["q_proj", "v_proj"]] * num_layers
    assert len(shape.kinds) == (2 if 0 < num_layers < 32 else 1)
    whole = llama("7B").count_adapter(16, ("q_proj", "v_proj"))
    assert shape.count_adapter(16, targets) == whole * num_layers // 32


def test_a_plan_counts_the_adapter_of_some_layers():
    request = ask(make_pcs("RTX 4090"))
    adapter = replace(request.spec.adapter, targets=UPPER_HALF)
    half = replace(request, spec=replace(request.spec, adapter=adapter))
    adapter = replace(adapter, targets=("q_proj", "v_proj"))
    whole = replace(request, spec=replace(request.spec, adapter=adapter))

    plans = [make_plan(one).chosen for one in (half, whole)]

    trained = [one.gpus[0].memory.adapter_bytes for one in plans if one is not None]
    assert trained[0] == pytest.approx(trained[1] / 2)
    left = [list_parts(one.shape, one.spec)[0].num_weights for one in (half, whole)]
    assert left[0] - left[1] == 16 * 2 * 4096**2

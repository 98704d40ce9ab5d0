"""What is offered where a run does not fit: all that would make it fit, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from agents.contract.cards import list_cards
from agents.contract.spec import AdapterSpec, RunSpec
from app.planning.advice import apply_change
from app.planning.cluster import Cluster
from app.planning.model_shape import read_shape
from app.planning.plan import DataSize, Plan, PlanRequest, make_plan
from tests.app.planning.clusters import ask, make_node
from tests.bench.measured_runs import read_runs

SHAPES = {name: read_shape(config) for name, config in read_runs()["shapes"].items()}
HOME_CARDS = [name for name in list_cards() if name.startswith("RTX")][::4]


def request_of(shape: str, card: str, **changes: object) -> PlanRequest:
    found = ask(Cluster(nodes=(make_node("pc", card),)), "7B", **changes)  # type: ignore[arg-type]
    spec = replace(found.spec, adapter=replace(found.spec.adapter, targets="all-linear"))
    return replace(found, spec=spec, shape=SHAPES[shape])


def with_spec(request: PlanRequest, spec: RunSpec) -> PlanRequest:
    longest = min(spec.sequence_tokens, request.data.longest_tokens or spec.sequence_tokens)
    data = DataSize(num_rows=1000, mean_tokens=longest, longest_tokens=longest)
    return replace(request, spec=spec, data=data)


def fits(request: PlanRequest, **change: object) -> bool:
    spec = apply_change(request.spec, {k.replace("__", "."): v for k, v in change.items()})
    return make_plan(with_spec(request, spec)).chosen is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("card", HOME_CARDS)
@pytest.mark.usefixtures("resident_only")
def test_what_is_offered_fits_and_what_would_fit_is_offered(shape: str, card: str) -> None:
    for kind in ("full", "lora", "qlora"):
        request = request_of(shape, card, kind=kind, sequence_tokens=8192)
        plan = make_plan(request)
        if plan.chosen is not None:
            continue
        offers = [advice for advice in plan.advice if advice.change]
        for advice in offers:
            assert fits(request, **{k.replace(".", "__"): v for k, v in advice.change.items()})
            assert re.search(r"with \d+\.\d of \d+\.\d GiB$", advice.text)
        if kind != "qlora" and fits(request, adapter__kind="qlora"):
            assert any(one.change.get("adapter.kind") in ("lora", "qlora") for one in offers)
        if fits(request, sequence_tokens=2048):
            assert any("sequence_tokens" in one.change for one in offers)
        if not offers:
            assert not fits(
                request, adapter__kind="qlora", optimizer="paged_adamw_8bit", adapter__rank=8,
                sequence_tokens=1024,
            )  # fmt: skip
            assert "No change of the run file makes it fit" in plan.advice[-1].text


def test_only_what_can_be_started_is_offered() -> None:
    plan = make_plan(ask(Cluster(nodes=(make_node("pc", "RTX 3060"),)), "70B"))
    assert all("parallel" not in advice.change for advice in plan.advice)


def test_a_full_training_that_is_too_large_is_offered_adapters_with_numbers() -> None:
    plan: Plan = make_plan(ask(Cluster(nodes=(make_node("pc", "RTX 3090"),)), "7B", kind="full"))
    words = [advice.text for advice in plan.advice]
    assert words[0].startswith("Train a LoRA adapter: it then fits on pc, with ")


def test_several_changes_together_are_offered_where_none_suffices() -> None:
    adapter = AdapterSpec(kind="lora", rank=64)
    request = request_of("Llama-2-7B", "RTX 4050 Laptop GPU", kind="lora", sequence_tokens=16384)
    plan = make_plan(replace(request, spec=replace(request.spec, adapter=adapter)))
    (offer,) = [advice for advice in plan.advice if advice.change]
    assert len(offer.change) > 1
    assert " and " in offer.text

"""What is offered where a run does not fit: all that would make it fit, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from agents.contract.parallel import ParallelMode
from agents.contract.spec import AdapterKind, AdapterSpec, RunSpec
from agents.shared.cards import list_cards
from app.planning.advice.changes import apply_change
from app.planning.hardware.cluster import Cluster, ethernet
from app.planning.plan import DataSize, Plan, PlanRequest, make_plan
from app.planning.shape.model_shape import read_shape
from tests.app.planning.clusters import ask, make_node, make_pcs
from tests.bench.planning.measured_runs import read_runs

SHAPES = {name: read_shape(config) for name, config in read_runs()["shapes"].items()}
HOME_PCS = ("RTX 5070 Ti", "RTX 4070 Laptop GPU", "RTX 3070 Ti")
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


# Command R: its embedding, 256,000 words wide, leaves a card of 8 GB no room, streamed or not.
LARGE_WORDS = read_shape({
    "model_type": "cohere", "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528,
    "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 64,
})  # fmt: skip


def test_a_change_is_offered_that_makes_it_fit_on_some_of_the_nodes() -> None:
    nodes = (make_node("large", "RTX 5070 Ti"), make_node("small", "RTX 3070 Ti"))
    asked = ask(Cluster(nodes=nodes), sequence_tokens=32768)
    plan = make_plan(request := replace(asked, shape=LARGE_WORDS))
    assert plan.chosen is None
    (offer,) = plan.advice
    assert offer.text.startswith("Shorten sequences to 8,192 tokens, and use large alone: it then")
    assert offer.change == {"sequence_tokens": 8192, "nodes": ("large",)}
    assert fits(request, **offer.change)
    # All nodes are needed where the run file names them.
    named = make_plan(replace(request, spec=replace(request.spec, nodes=("large", "small"))))
    assert [one.change for one in named.advice] == [{}]


@pytest.mark.parametrize(("parallel", "kind"), [("data", "qlora"), ("single", "lora")])
def test_another_way_is_offered_where_the_one_of_the_run_file_does_not_fit(
    parallel: ParallelMode, kind: AdapterKind
) -> None:
    pcs = make_pcs(*["RTX 4070"] * 7)
    request = ask(pcs, "70B" if kind == "qlora" else "13B", kind, parallel=parallel)
    last = make_plan(request).advice[-1]
    mode = last.change["parallel"]
    assert last.text.startswith("It fits as ")
    assert last.text.endswith(f", with parallel: {mode}")
    assert mode in ("pipeline", "streamed")
    assert fits(request, **last.change)


def test_changes_that_only_help_together_are_one_sentence() -> None:
    asked = ask(make_pcs("RTX 4070"), "70B", "lora", parallel="streamed", sequence_tokens=4096)
    spec = replace(asked.spec, adapter=AdapterSpec(targets="all-linear", rank=32))
    (offer,) = make_plan(replace(asked, spec=spec)).advice
    assert len(offer.change) > 1
    for key in offer.change:  # and each of them matters
        less = {k.replace(".", "__"): v for k, v in offer.change.items() if k != key}
        assert not fits(replace(asked, spec=spec), **less)
    assert not re.search(r" [A-KM-PR-Z]", offer.text.partition(":")[0])  # but for LoRA and QLoRA
    assert fits(
        replace(asked, spec=spec), **{k.replace(".", "__"): v for k, v in offer.change.items()}
    )


def test_what_the_smallest_run_needs_is_what_it_needs_when_streamed() -> None:
    alone = ask(Cluster(nodes=(make_node("small", "RTX 3070 Ti"),)), sequence_tokens=32768)
    request = replace(alone, shape=LARGE_WORDS)
    needs = {}
    for mode in ("auto", "single"):
        spec = replace(request.spec, parallel=mode)  # type: ignore[arg-type]
        (advice,) = make_plan(replace(request, spec=spec)).advice
        needs[mode] = float(re.findall(r"a card with (\S+) GiB free", advice.text)[0])
    assert 8 < needs["auto"] < 0.7 * needs["single"]


def test_a_way_within_the_margin_of_forecasts_is_neither_advised_nor_said_to_need_a_change() -> (
    None
):
    # Divided over all three PCs it fits and is faster than on the largest alone, but not by enough.
    nodes = [make_node(name, card) for name, card in zip("abc", HOME_PCS, strict=True)]
    cluster = Cluster(nodes=tuple(nodes), default_link=ethernet(0.5))
    asked = ask(cluster, kind="lora", sequence_tokens=1024)
    spec = replace(asked.spec, adapter=AdapterSpec(kind="lora", targets="all-linear"))
    shape = read_shape({
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
    })  # fmt: skip
    data = DataSize(num_rows=5000, mean_tokens=614, longest_tokens=1024)
    plan = make_plan(replace(asked, spec=spec, shape=shape, data=data))
    assert plan.chosen is not None
    assert plan.chosen.nodes == ("a",)
    others = [one for one in plan.others if one.fits and one.runnable and len(one.nodes) == 3]
    assert any(one.step_s < plan.chosen.step_s for one in others)
    assert any("4 bits" in one.text for one in plan.advice)
    for one in plan.advice:
        assert "times faster" not in one.text
        assert "streamed" not in one.text
        assert "pipeline" not in one.text


def test_a_run_that_streams_16_bit_weights_is_advised_4_bits_where_that_is_faster() -> None:
    gains = {}
    for size in ("7B", "13B", "70B"):
        request = ask(make_pcs("RTX 4070"), size, "lora")
        plan = make_plan(request)
        assert plan.chosen is not None
        assert plan.chosen.mode == "streamed"
        advised = [one for one in plan.advice if one.change == {"adapter.kind": "qlora"}]
        spec = apply_change(request.spec, {"adapter.kind": "qlora"})
        smaller = make_plan(with_spec(request, spec)).chosen
        assert smaller is not None
        gains[size] = plan.chosen.step_s / smaller.step_s
        assert len(advised) == (gains[size] > 1.5)
    assert gains["7B"] < 1.5 < gains["70B"]


def test_a_change_is_offered_to_data_parallel_only_if_it_fits_on_two_gpus() -> None:
    """One card would be enough for it as `single`, which the run file does not say."""
    nodes = tuple(make_node(name, card) for name, card in zip("abc", HOME_PCS, strict=True))
    asked = ask(Cluster(nodes=nodes), "13B", parallel="data", sequence_tokens=8192)
    plan = make_plan(asked)
    assert plan.chosen is None
    offers = [one for one in plan.advice if one.change]
    assert offers
    for offer in offers:
        assert fits(asked, **{k.replace(".", "__"): v for k, v in offer.change.items()})


def test_a_run_that_only_a_larger_pc_holds_names_its_ram_and_is_compared_with_the_nearest() -> None:
    node = replace(make_node("pc", "RTX 4070"), ram_bytes=None)
    plan = make_plan(ask(Cluster(nodes=(node,)), "70B"))
    (advice,) = plan.advice
    assert re.search(r"needs \d\.\d GiB of RAM for training on pc, whose RAM is not", advice.text)
    assert [one.mode for one in plan.others] == ["streamed", "single"]
    # With the GPU short as well, its RAM would not help.
    both = make_plan(ask(make_pcs("RTX 3070 Ti"), "70B", sequence_tokens=65536))
    assert "RTX 3070 Ti of pc1 would need" in both.others[0].reason
    small = ask(make_pcs("RTX 3070 Ti"), parallel="pipeline")
    (alone,) = make_plan(replace(small, shape=LARGE_WORDS)).advice
    assert alone.text.startswith("A pipeline needs two GPUs or more")


def test_one_gpu_is_data_parallel_with_itself() -> None:
    plan = make_plan(ask(make_pcs("RTX 4070"), parallel="data"))
    assert plan.chosen is not None
    assert plan.chosen.mode == "single"


@pytest.mark.parametrize(
    ("family", "parallel", "kind", "words"),
    [
        ("zamba2", "streamed", "lora", "family zamba2 cannot be streamed: they share weights"),
        ("zamba2", "pipeline", "lora", "cannot be cut into stages: their layers share weights"),
        ("llama", "streamed", "full", "keeps frozen weights outside the GPU"),
    ],
)
def test_a_way_that_cannot_train_the_run_is_refused_by_name(
    family: str, parallel: ParallelMode, kind: AdapterKind, words: str
) -> None:
    request = request_of(next(iter(SHAPES)), "RTX 4070")
    spec = replace(request.spec, parallel=parallel, adapter=AdapterSpec(kind=kind))
    plan = make_plan(replace(with_spec(request, spec), shape=replace(request.shape, family=family)))
    assert plan.chosen is None
    assert words in plan.advice[0].text

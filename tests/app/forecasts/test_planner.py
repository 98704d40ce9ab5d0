"""The planner's question: shapes, data and nodes are found, and what was guessed is said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.node import (
    Calibration,
    GpuFacts,
    GpuSample,
    InterfaceFacts,
    MigGpu,
    NodeFacts,
    Sample,
)
from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.errors import UserError
from app.forecasts.learning import compare_run
from app.forecasts.planner import Planner, describe_nodes
from app.library.data_key import make_data_key
from app.planning.candidate import Plan, PlanRequest
from app.planning.hardware.cluster import Cluster
from app.planning.plan import make_plan
from app.runs.lifecycle.launch import start_run
from app.runs.placement import place_ranks
from app.runs.services import LaunchForecast, Services
from app.storage.planning import CountedData, LinkRecord
from tests.app.forecasts.test_learning import CONFIG
from tests.fakes.cluster import FakeCluster, make_facts
from tests.fakes.models import write_model

GIB = 2**30
LLAMA = RunSpec(
    model="meta-llama/Llama-2-7b-hf",
    data=DataSpec(train="the data"),
    adapter=AdapterSpec(kind="qlora"),
)


def gpu_facts(card: str = "NVIDIA GeForce RTX 3090", gib: int = 24, **changes: object) -> NodeFacts:
    gpu = GpuFacts(uuid="GPU-1", index=0, name=card, memory_bytes=gib * GIB, capability="8.6")
    return make_facts(gpus=(gpu,), memory_bytes=32 * GIB, **changes)


def ask(services: Services, spec: RunSpec, cluster: Cluster, **options: object) -> Plan:
    return asyncio.run(Planner(services).plan(spec, cluster, **options))  # type: ignore[arg-type]


def home(services: Services) -> Cluster:
    return describe_nodes(services.planning, {"alpha": gpu_facts(), "beta": gpu_facts()})


def test_a_plan_of_a_well_known_model_needs_no_file_and_no_network(services: Services) -> None:
    plan = ask(services, LLAMA, home(services), silent=("gamma",))
    assert plan.chosen is not None
    assert 3 * GIB < plan.chosen.gpus[0].memory.expected_bytes < 24 * GIB
    assert "sizes of meta-llama/Llama-2-7b-hf: from Rackless's own table" in plan.assumptions
    assert "gamma does not answer and took no part in this plan" in plan.assumptions
    assert any("rackless preview counts it" in text for text in plan.assumptions)


def test_a_plan_names_cards_that_cannot_train_and_measurements_that_are_not_used(
    services: Services,
) -> None:
    divided = MigGpu(index=1, name="NVIDIA A100")
    turing = "NVIDIA GeForce RTX 2080 Ti"
    gpu = GpuFacts(uuid="GPU-2", index=0, name=turing, memory_bytes=11 * GIB, capability="7.5")
    facts = {"alpha": make_facts(gpus=(gpu,), memory_bytes=32 * GIB, mig_gpus=(divided,))}
    found = Calibration(card=turing, matrix_flops_per_s=40e12)
    for precision, is_used in (("", False), ("float16", True)):
        services.planning.save_calibration("alpha", "GPU-2", replace(found, precision=precision))
        cluster = describe_nodes(services.planning, facts)
        assert (cluster.nodes[0].gpus[0].calibration is not None) == is_used
        plan = ask(services, LLAMA, cluster)
        assert any("which this card only emulates" in t for t in plan.assumptions) != is_used
        assert (
            "alpha: GPU 1 (NVIDIA A100) is in MIG mode without slices, so no program can use it"
        ) in plan.assumptions


def test_config_of_a_folder_on_the_nodes_is_asked_for_there(
    services: Services, cluster: FakeCluster
) -> None:
    spec = replace(LLAMA, model="/models/tiny")
    cluster.nodes["alpha"].reachable = False
    cluster.nodes["beta"].configs["/models/tiny"] = CONFIG
    planner = Planner(services)
    known = home(services)
    with pytest.raises(UserError, match="are not known here"):
        asyncio.run(planner.plan(spec, known, ask_remote=False))
    plan = asyncio.run(planner.plan(spec, known, online=("alpha", "beta")))
    assert "sizes of /models/tiny: from beta" in plan.assumptions
    asyncio.run(planner.plan(spec, known, ask_remote=False))  # remembered
    assert cluster.nodes["beta"].calls.count("model_config") == 1
    with pytest.raises(UserError, match="no model folder /models/none here nor on beta"):
        asyncio.run(planner.plan(replace(spec, model="/models/none"), known, online=("beta",)))


def test_a_plan_leaves_out_nodes_by_itself_but_not_listed_ones(services: Services) -> None:
    nodes = {f"pc{place}": gpu_facts("NVIDIA GeForce RTX 4070", 12) for place in range(7)}
    known = describe_nodes(services.planning, nodes)
    plan = ask(services, LLAMA, known)
    assert plan.chosen is not None
    assert len(plan.chosen.nodes) == 6  # 24 sequences are divided evenly
    named = ask(services, replace(LLAMA, nodes=tuple(nodes)), known)
    assert named.chosen is not None
    assert len(named.chosen.nodes) == 7
    assert not [advice for advice in plan.advice if "nodes" in advice.change]


def test_a_way_that_cannot_be_trained_yet_is_shown_first(services: Services) -> None:
    plan = ask(services, replace(LLAMA, parallel="sharded"), home(services))
    assert plan.chosen is None
    assert plan.others[0].mode == "sharded"
    assert plan.others[0].step_s > 0
    assert [advice.change for advice in plan.advice] == [{"parallel": "auto"}]


def test_lora_on_weights_in_4_bits_is_planned_as_it_is_held(
    services: Services, spec: RunSpec
) -> None:
    spec = replace(spec, adapter=AdapterSpec(kind="lora"))
    for settings, kind in ((None, "lora"), ({"load_in_4bit": True}, "qlora")):
        write_model(Path(spec.model), **{**CONFIG, "quantization_config": settings})
        request, notes = asyncio.run(Planner(services).build_request(spec, home(services)))
        assert request.spec.adapter.kind == kind
        assert any("in 4 bits" in one for one in notes) == (kind == "qlora")


def test_counted_data_replaces_the_guess(services: Services, spec: RunSpec) -> None:
    write_model(Path(spec.model), **CONFIG)
    question, notes = asyncio.run(Planner(services).build_request(spec, home(services)))
    assert question.data.num_rows == 1
    assert notes == ("tokens of chats.jsonl estimated from its rows, at 4 characters each",)
    services.planning.save_counted(
        make_data_key(spec), CountedData(num_rows=10, num_tokens=500, longest_tokens=99)
    )
    question, notes = asyncio.run(Planner(services).build_request(spec, home(services)))
    assert (question.data.num_rows, question.data.mean_tokens) == (10, 50)
    assert (question.data.longest_tokens, notes) == (99, ())


def test_what_was_measured_of_nodes_is_used(services: Services) -> None:
    facts = gpu_facts(
        address="192.168.1.7",
        interfaces=(InterfaceFacts(name="eth0", address="192.168.1.7", speed_mbit=2500),),
    )
    nodes = {"alpha": facts, "beta": replace(facts, hostname="b"), "gamma": facts}
    store = services.planning
    measured = Calibration(card=facts.gpus[0].name, matrix_flops_per_s=5e13)
    store.save_calibration("alpha", "GPU-1", measured)
    link = LinkRecord(
        node="alpha", peer="beta", round_trip_s=3e-4, bytes_per_s=1.1e8, measured_s=1.0
    )
    back = replace(link, node="beta", peer="alpha", bytes_per_s=9e7, round_trip_s=2e-4)
    store.save_links([link, back])
    sample = Sample(
        time_s=1.0,
        seq=1,
        gpus=(GpuSample(uuid="GPU-1", index=0, name="x", memory_used_bytes=GIB, process_ids=()),),
    )
    known = describe_nodes(store, nodes, {"alpha": sample})
    assert known.nodes[0].gpus[0].calibration == measured
    assert known.nodes[0].gpus[0].desktop_bytes == GIB
    # The same card is as fast in another PC, until it is measured there.
    (other,) = known.nodes[1].gpus
    assert (other.calibration, other.measured_on) == (measured, "alpha")
    way = known.link("alpha", "beta")
    assert (way.bytes_per_s, way.latency_s, way.source) == (9e7, 3e-4, "measured")
    assert known.link("alpha", "gamma").source == "nominal"


def test_a_launch_keeps_the_forecast_of_its_own_ranks(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    write_model(Path(spec.model), **CONFIG)
    for name in ("alpha", "beta"):
        facts = gpu_facts()
        gpu = replace(facts.gpus[0], uuid=f"GPU-{name}")
        cluster.nodes[name].facts_now = replace(facts, gpus=(gpu,), address="127.0.0.1")
    run_id = asyncio.run(start_run(services, replace(spec, nodes=("beta", "alpha"))))
    found = compare_run(services, services.runs.get(run_id))
    assert found is not None
    assert (found.forecast.mode, found.measured) == ("data", None)
    assert [rank.node for rank in found.forecast.ranks] == ["beta", "alpha"]
    assert sum(rank.share or 0.0 for rank in found.forecast.ranks) == pytest.approx(1.0)
    assert all(rank.allocated_bytes for rank in found.forecast.ranks)
    cluster.nodes["gamma"].facts_now = gpu_facts(address="127.0.0.1")
    alone = asyncio.run(start_run(services, replace(spec, nodes=("gamma",))))
    found = compare_run(services, services.runs.get(alone))
    assert found is not None
    assert found.forecast.mode == "single"


def test_a_model_of_unknown_shape_is_launched_without_a_forecast(
    services: Services, spec: RunSpec
) -> None:
    run_id = asyncio.run(start_run(services, replace(spec, nodes=("alpha",))))
    assert compare_run(services, services.runs.get(run_id)) is None


def test_a_start_that_leaves_out_nodes_says_so(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    write_model(Path(spec.model), **CONFIG)
    for name in cluster.nodes:
        facts = gpu_facts()
        gpu = replace(facts.gpus[0], uuid=f"GPU-{name}")
        cluster.nodes[name].facts_now = replace(facts, gpus=(gpu,), address="127.0.0.1")

    everywhere = replace(spec, nodes="all", parallel="auto", batch_sequences=2)
    run_id = asyncio.run(start_run(services, everywhere))
    texts = [event.text for event in services.runs.events(run_id)]
    (text,) = [text for text in texts if text.startswith("nodes: ")]
    assert "alpha" in text
    facts = {name: node.facts_now for name, node in cluster.nodes.items()}
    asked = replace(everywhere, nodes=("alpha", "beta", "gamma"))
    found = asyncio.run(Planner(services).forecast(asked, facts, place_ranks(facts)))
    assert found.advice == ()
    assert found.forecast is not None
    assert len(found.places) == 3


def test_a_start_is_planned_once_and_before_it_is_recorded(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(Path(spec.model), **CONFIG)
    recorded: list[int] = []

    def count(question: PlanRequest) -> Plan:
        recorded.append(len(services.runs.store.all()))
        return make_plan(question)

    monkeypatch.setattr("app.forecasts.planner.make_plan", count)
    asyncio.run(start_run(services, replace(spec, nodes="all", parallel="auto")))
    assert recorded == [0]


def test_a_start_executes_the_plan_that_was_shown_or_says_what_changed(services: Services) -> None:
    names = ("alpha", "beta", "gamma")
    nodes = {
        name: replace(
            found, gpus=(replace(found.gpus[0], uuid=f"GPU-{name}"),), address="127.0.0.1"
        )
        for name in names
        for found in [gpu_facts("NVIDIA GeForce RTX 4070", 12)]
    }
    planner = Planner(services)
    known = describe_nodes(services.planning, nodes)
    shown = asyncio.run(planner.plan(LLAMA, known))
    assert shown.chosen is not None

    def start(facts: dict[str, NodeFacts]) -> LaunchForecast:
        return asyncio.run(Planner(services).forecast(LLAMA, facts, place_ranks(facts)))

    same = start(nodes)
    assert (same.plan_id, same.changed) == (shown.id, "")
    assert same.places == tuple((gpu.node, gpu.device) for gpu in shown.chosen.gpus)
    assert same.forecast is not None
    assert same.forecast.mode == shown.chosen.mode
    assert same.forecast.tokens_per_s == shown.chosen.tokens_per_s
    fewer = start({name: nodes[name] for name in names[:2]})
    assert fewer.plan_id != shown.id
    assert fewer.changed.startswith(f"since plan {shown.id} was shown, gamma is away: it is ")
    assert {name for name, _ in fewer.places} <= {"alpha", "beta"}

"""Plans of models that no card holds: pipelines, replicas of them, and streamed weights."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from agents.contract.parallel import PARALLEL
from agents.contract.run import RankPlacement
from app.planning.build_context import open_case
from app.planning.candidate import Candidate, Plan, PlanRequest
from app.planning.cut import find_problem, make_cut
from app.planning.hardware.cluster import Cluster
from app.planning.plan import make_plan
from app.planning.reasons import describe_candidate as describe_way
from app.planning.strategies.pipeline_plan import divide_workers, plan_chain, plan_pipelines
from app.planning.strategies.pipeline_schedule import choose_depths, time_pipeline
from app.planning.strategies.weight_streaming import plan_streamed
from app.presentation.plan_text import describe_candidate, describe_setting
from app.presentation.stage_text import list_planned_stages
from tests.app.planning.clusters import GIB, ask, example, make_node, make_pcs

SEVEN = make_pcs(*["RTX 4070"] * 7)


@pytest.fixture
def all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans choose pipelines and streamed weights."""
    for mode in ("pipeline", "streamed"):
        monkeypatch.setitem(PARALLEL, mode, replace(PARALLEL[mode], refusal=""))


def small_pc(
    card: str = "RTX 4070", *, ram_gib: int = 32, disk_bytes_per_s: float | None = None
) -> Cluster:
    node = replace(
        make_node("pc1", card), ram_bytes=ram_gib * GIB, disk_bytes_per_s=disk_bytes_per_s
    )
    return Cluster(nodes=(node,))


def place(candidate: Candidate) -> list[RankPlacement]:
    return [
        RankPlacement(rank=rank, local_rank=0, node=gpu.node, device=gpu.device)
        for rank, gpu in enumerate(candidate.gpus)
    ]


def of_mode(plan: Plan, mode: str) -> list[Candidate]:
    every = (plan.chosen, *plan.others)
    return [one for one in every if one is not None and one.mode == mode]


def ask_70b(cluster: Cluster, **changes: object) -> PlanRequest:
    return ask(cluster, "70B", batch_sequences=64, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the wire


def test_more_micro_batches_in_flight_hide_a_slow_link() -> None:
    stages, transfers = [1.0] * 7, [0.1] * 6
    plain = time_pipeline(stages, transfers, 64)
    deep = time_pipeline(stages, transfers, 64, choose_depths(stages, transfers, 64))

    assert deep.network_s < 0.2 * plain.network_s
    # What remains is filling and draining once.
    assert deep.network_s == pytest.approx(2 * sum(transfers))


def test_no_depth_hides_a_link_that_is_slower_than_the_stages() -> None:
    stages, transfers = [1.0] * 3, [0.8] * 2
    time = time_pipeline(stages, transfers, 64, (64, 64, 64))

    # The stage in the middle sends features on and gradients back: 1.6 s per micro-batch.
    assert time.total_s == pytest.approx(3 * 1.0 + 2 * 1.6 + 63 * 1.6)


# ---------------------------------------------------------------- what a plan chooses


def test_70b_on_seven_pcs_is_planned_with_the_faster_of_both_ways(all_modes: None) -> None:
    request = ask_70b(example("seven-4070"))
    plan = make_plan(request)

    chosen = plan.chosen
    assert chosen is not None
    others = of_mode(plan, "pipeline") + of_mode(plan, "streamed")
    assert chosen.step_s == min(one.step_s for one in others if one.fits)
    pipeline = max(of_mode(plan, "pipeline"), key=lambda one: one.fits)
    assert pipeline.fits
    # 36 GB of weights in 77 GB of memory.
    gibs = [gpu.memory.expected_bytes / GIB for gpu in pipeline.gpus]
    assert all(5 < gib < 11.8 for gib in gibs)
    # Measured beside this trial: 380 tok/s at 1 Gb/s from cards of 37 TFLOP/s; these reach 50.
    assert 450 < pipeline.tokens_per_s < 600
    rows = dict(describe_candidate(chosen))
    assert 4 <= float(rows["10 million tokens"].removesuffix(" h")) < 5
    cut = make_cut(pipeline, place(pipeline), request.shape.num_layers)
    assert cut is not None
    cut.check_foreign()
    assert {stage.num_layers for stage in cut.stages} == {10, 11, 12}  # holes, too, in WSL
    assert (cut.mode, cut.num_replicas, cut.num_layers) == ("pipeline", 1, 80)
    depths = [stage.max_in_flight or 0 for stage in cut.stages]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 7  # more than 1F1B has, for the wire


def test_70b_on_one_small_pc_streams_from_its_ssd(all_modes: None) -> None:
    plan = make_plan(ask_70b(small_pc()))

    assert plan.chosen is not None
    (gpu,) = plan.chosen.gpus
    assert (plan.chosen.mode, gpu.streams_from, gpu.setting.num_recomputed) == (
        "streamed",
        "disk",
        80,
    )
    # Inputs of 80 layers are in RAM beside the layers on their way: that is why they recompute.
    assert 10 * GIB < gpu.host_bytes <= 24 * GIB
    assert any("SSD is assumed to read 2 GB/s" in note for note in plan.assumptions)
    assert "layers from the SSD" in describe_setting(gpu)
    cut = make_cut(plan.chosen, place(plan.chosen), 80)
    assert cut is not None
    assert cut.stages[0].num_resident == 80 - gpu.num_streamed


def test_a_slow_disk_is_waited_for_and_ram_is_preferred(all_modes: None) -> None:
    def wait_s(cluster: Cluster) -> float:
        found = make_plan(ask_70b(cluster)).chosen
        assert found is not None
        return found.parts_s.input_s

    assert wait_s(small_pc(disk_bytes_per_s=3e9)) == 0
    assert wait_s(small_pc(disk_bytes_per_s=0.15e9)) > 100
    slow = make_plan(ask_70b(small_pc(disk_bytes_per_s=0.15e9))).chosen
    assert slow is not None
    assert slow.reason.endswith("of a step waits for streamed weights")
    named = [one.text for one in make_plan(ask_70b(small_pc(disk_bytes_per_s=0.15e9))).advice]
    assert any("that of pc1 at 0.15 GB/s: a faster SSD" in text for text in named)
    assert not any("SSD" in one.text for one in make_plan(ask_70b(small_pc())).advice)
    # With RAM for the weights, the disk does not matter.
    assert wait_s(small_pc(ram_gib=96, disk_bytes_per_s=0.15e9)) == 0


def test_13b_on_an_8_gb_card_streams_from_ram(all_modes: None) -> None:
    plan = make_plan(ask(small_pc("RTX 3070 Ti"), "13B"))

    assert plan.chosen is not None
    assert (plan.chosen.mode, plan.chosen.gpus[0].streams_from) == ("streamed", "ram")
    assert plan.chosen.gpus[0].fits


def test_gpus_of_one_pc_hold_one_copy_of_streamed_weights(all_modes: None) -> None:
    def stream(*cards: str) -> Candidate:
        cluster = Cluster(nodes=(make_node("pc1", *cards),))  # with 64 GiB
        found = make_plan(ask_70b(cluster, parallel="streamed")).chosen
        assert found is not None
        return found

    alone, both = stream("RTX 4070"), stream("RTX 4070", "RTX 4070")
    assert [gpu.streams_from for gpu in both.gpus] == ["ram", "ram"]
    # 30 GiB of weights once, and 10 GiB of inputs for each.
    assert alone.gpus[0].host_bytes == pytest.approx(40 * GIB, rel=0.02)
    assert sum(gpu.host_bytes for gpu in both.gpus) == pytest.approx(50 * GIB, rel=0.02)
    assert "from RAM, where the GPUs of a PC share one copy, while others" in both.reason
    assert "share" not in alone.reason


def test_streamed_weights_take_no_more_ram_than_the_trainer_lets_them() -> None:
    short = {"batch_sequences": 1, "sequence_tokens": 1024, "parallel": "streamed"}
    for ram_gib, tier in ((56, "ram"), (44, "disk")):
        cluster = small_pc(ram_gib=ram_gib)
        case = open_case(ask(cluster, "70B", **short))  # type: ignore[arg-type]
        found = plan_streamed(case, case.workers)
        assert found is not None
        (gpu,) = found.gpus
        # Of 44 GiB, 34 are free, and 60 % of 40 are 24; the weights have 28.
        assert gpu.streams_from == tier
        assert cluster.nodes[0].free_ram_bytes > 29 * GIB


def test_magnitudes_take_memory_and_time_where_layers_are_streamed(all_modes: None) -> None:
    request = ask(small_pc("RTX 3070 Ti"), "13B")
    adapter = replace(request.spec.adapter, dora=True)
    plain = make_plan(request).chosen
    dora = make_plan(replace(request, spec=replace(request.spec, adapter=adapter))).chosen

    assert plain is not None
    assert dora is not None
    assert (dora.mode, dora.fits) == ("streamed", True)
    assert dora.step_s > plain.step_s
    ours, others = dora.gpus[0].memory, plain.gpus[0].memory
    assert ours.adapter_bytes > others.adapter_bytes


def test_ways_that_cannot_be_trained_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("pipeline", "streamed"):
        monkeypatch.setitem(PARALLEL, mode, replace(PARALLEL[mode], refusal="not available yet"))
    plan = make_plan(ask_70b(SEVEN))

    assert plan.chosen is None
    assert "this version cannot train yet" in plan.advice[0].text


# ---------------------------------------------------------------- replicas


def test_replicas_of_pipelines_hold_the_model_and_share_the_batch(all_modes: None) -> None:
    cards = ["RTX 4070"] * 5
    request = ask(make_pcs(*cards), "13B", batch_sequences=40, parallel="pipeline")
    case = open_case(request)
    found = plan_pipelines(case, divide_workers(case.workers, 2))

    assert found is not None
    assert found.fits
    assert found.num_replicas == 2
    cut = make_cut(found, place(found), 40)
    assert cut is not None
    cut.check_foreign()  # each replica has every layer once
    sizes = [sum(stage.replica == replica for stage in cut.stages) for replica in (0, 1)]
    assert sorted(sizes) == [2, 3]
    shares = [sum(gpu.share for gpu in found.gpus if gpu.replica == r) for r in (0, 1)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares[sizes.index(3)] > shares[sizes.index(2)]
    assert describe_way(case, found).startswith("2 pipelines on pc1, pc2")
    # Shown one pipeline after the other, each as a stair.
    rows = list_planned_stages(found)
    assert [row.first_layer == 0 for row in rows].count(True) == 2
    for row, after in itertools.pairwise(rows):
        assert after.first_layer in (row.stop_layer, 0)
    assert rows[0].layers_text.startswith("pipeline 1, layers 1 to ")
    assert sorted(row.rank for row in rows) == [0, 1, 2, 3, 4]
    # Its bubble is that of three stages, not of five.
    (whole,) = [one for one in of_mode(make_plan(request), "pipeline") if one.num_replicas == 1
                and len(one.gpus) == 5]  # fmt: skip
    assert found.parts_s.bubble_s < whole.parts_s.bubble_s


def test_unlike_cards_get_groups_of_equal_speed() -> None:
    case = open_case(ask(make_pcs("RTX 5070 Ti", "RTX 3070 Ti", "RTX 3070 Ti"), "13B"))
    groups = divide_workers(case.workers, 2)

    assert [[worker.node.name for worker in group] for group in groups] == [["pc1"], ["pc2", "pc3"]]


# ---------------------------------------------------------------- what does not fit


def test_a_stage_that_cannot_fit_is_named_with_the_smallest_change(all_modes: None) -> None:
    cards = ("RTX 3070 Ti", "RTX 3070 Ti")
    plan = make_plan(ask(make_pcs(*cards), "13B", sequence_tokens=12288, parallel="pipeline"))

    assert plan.chosen is None
    assert plan.others[0].mode == "pipeline"  # what the run file names comes first
    problem = find_problem(plan.others[0], plan.advice)
    assert problem is not None
    message, hint = problem
    assert message.startswith("parallel: pipeline does not fit on pc1: layers 1 to 20 would need")
    assert message.endswith("and its RTX 3070 Ti has 7.8")
    assert hint.startswith("Shorten sequences to 6,144 tokens: it then fits, pipeline on pc1")
    change = plan.advice[0].change
    again = make_plan(
        ask(make_pcs(*cards), "13B", parallel="pipeline", **change)  # type: ignore[arg-type]
    )
    assert again.chosen is not None


def test_a_named_way_that_does_not_fit_points_to_the_one_that_does(all_modes: None) -> None:
    cards = ("RTX 3070 Ti", "RTX 3070 Ti")
    plan = make_plan(ask(make_pcs(*cards), "70B", batch_sequences=64, parallel="pipeline"))

    assert plan.chosen is None
    assert dict(plan.advice[-1].change) == {"parallel": "streamed"}


def test_a_pc_without_ram_is_named(all_modes: None) -> None:
    case = open_case(ask_70b(small_pc(ram_gib=6)))
    found = plan_streamed(case, case.workers)

    assert found is not None
    assert not found.fits
    problem = find_problem(found, ())
    assert problem is not None
    assert "on pc1: it would need" in problem[0]
    assert "GiB of RAM" in problem[0]
    (node,) = small_pc(ram_gib=6).nodes
    wsl = make_plan(ask_70b(Cluster(nodes=(replace(node, system="wsl"),)), parallel="streamed"))
    assert "GiB of RAM and has 2.2 to spare, as WSL pins less than half" in wsl.others[0].reason


def test_a_limit_of_ram_is_named_where_a_plan_does_not_fit(all_modes: None) -> None:
    place = "/sys/fs/cgroup/user.slice/memory.max"
    (node,) = small_pc(ram_gib=4).nodes
    limited = Cluster(nodes=(replace(node, ram_limit=place),))
    plan = make_plan(ask_70b(limited, parallel="streamed"))
    says = f"to spare, as {place} limits it to 4.0 GiB"
    assert says in plan.others[0].reason
    assert says in plan.advice[0].text
    case = open_case(ask_70b(limited))
    found = plan_streamed(case, case.workers)
    assert found is not None
    assert says in (find_problem(found, ()) or ("",))[0]


def test_a_forecast_that_is_a_little_off_refuses_nothing(all_modes: None) -> None:
    case = open_case(ask(SEVEN, "13B"))
    (gpu, *_) = plan_pipelines(case, [case.workers]).gpus  # type: ignore[union-attr]
    tight = replace(gpu, room_bytes=gpu.memory.expected_bytes - 1)
    found = plan_pipelines(case, [case.workers])
    assert found is not None
    near = replace(found, gpus=(tight, *found.gpus[1:]), fits=False)

    assert find_problem(near, ()) is None


def test_recompute_none_is_respected_by_stages() -> None:
    case = open_case(ask(SEVEN, "13B", recompute="none"))
    chain = plan_chain(case, case.workers)

    assert chain is not None
    assert all(stage.setting.num_recomputed == 0 for stage in chain.stages)


def test_a_pipeline_is_planned_only_where_the_trainer_can_cut_the_model(all_modes: None) -> None:
    request = ask(make_pcs(*["RTX 4070"] * 7), "70B", batch_sequences=64, parallel="pipeline")
    connected = replace(request.shape, may_be_cut=False, family="gemma4_text")
    plan = make_plan(replace(request, shape=connected))

    assert plan.chosen is None
    assert plan.advice[0].text.startswith("Models of the family gemma4_text cannot be cut")
    assert dict(plan.advice[-1].change) == {"parallel": "streamed"}
    # Only the last 20 layers have the projection that gets an adapter.
    bare = replace(request.shape.layers[0], linears=request.shape.layers[0].linears[1:])
    name = request.shape.layers[0].linears[0].name
    layers = (*[bare] * 60, *request.shape.layers[60:])
    adapter = replace(request.spec.adapter, targets=(name,))
    rare = replace(request, spec=replace(request.spec, adapter=adapter))
    assert make_plan(rare).chosen is not None
    assert make_plan(replace(rare, shape=replace(request.shape, layers=layers))).chosen is None

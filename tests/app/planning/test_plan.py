"""Plans of the three example clusters, of what users claim, and of what a spec asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.node import NodeFacts, ResourceLimit
from agents.contract.parallel import ParallelMode
from agents.contract.spec import AdapterKind
from app.planning.accuracy.learning import Corrections, RunOutcome
from app.planning.advice.changes import apply_change
from app.planning.candidate import Candidate
from app.planning.hardware.cluster import Cluster, LinkSpeed, PlannedGpu, PlannedNode, make_cluster
from app.planning.plan import DataSize, Plan, make_plan
from app.presentation.model_text import describe_limits
from tests.app.planning.clusters import GIB, ask, example, llama, make_node, make_pcs


def of_mode(plan: Plan, mode: ParallelMode) -> list[Candidate]:
    found = [plan.chosen] if plan.chosen is not None else []
    return [one for one in (*found, *plan.others) if one.mode == mode]


def test_three_unlike_pcs_share_by_their_speed() -> None:
    plan = make_plan(ask(example("three-mismatched")))

    assert plan.chosen is not None
    assert plan.chosen.mode == "data"
    assert plan.chosen.nodes == ("alpha", "beta", "gamma")
    alpha, beta, gamma = plan.chosen.gpus
    assert alpha.share > gamma.share > beta.share
    alone = {one.nodes[0]: one.tokens_per_s for one in of_mode(plan, "single")}
    # The claim is 2.5 times the fastest PC; the sum of the speeds is the bound, which is less.
    bound = sum(alone.values()) / alone["alpha"]
    assert bound < 2.5
    assert 0.9 * bound < plan.chosen.tokens_per_s / alone["alpha"] <= bound


def test_seven_equal_pcs_train_13b_together_and_a_better_batch_is_named() -> None:
    plan = make_plan(ask(example("seven-4070"), "13B"))

    assert plan.chosen is not None
    assert plan.chosen.mode == "data"
    assert any("batch_sequences" in advice.change for advice in plan.advice)


def test_70b_over_seven_12_gib_cards_streams_or_is_a_pipeline() -> None:
    plan = make_plan(ask(example("seven-4070"), "70B"))

    assert plan.chosen is not None
    assert plan.chosen.mode in ("streamed", "pipeline")
    (pipeline, *_) = of_mode(plan, "pipeline")
    assert pipeline.fits
    assert pipeline.gpus[0].layers is not None
    assert sum(b - a for a, b in (gpu.layers or (0, 0) for gpu in pipeline.gpus)) == 80


def test_what_fits_every_gpu_is_not_cut_unless_a_run_file_says_so() -> None:
    question = ask(example("seven-4070"), "13B")
    plan = make_plan(question)
    assert plan.chosen is not None
    assert plan.chosen.mode == "data"
    cut = make_plan(replace(question, spec=replace(question.spec, parallel="pipeline")))
    assert cut.chosen is not None
    assert cut.chosen.mode == "pipeline"
    for key, value in (("optimizer", "adamw_8bit"), ("compression", "powersgd")):
        other = make_plan(replace(question, spec=replace(question.spec, **{key: value})))
        assert not of_mode(other, "pipeline")
        (refused,) = other.refused
        assert (refused.mode, refused.keys) == ("pipeline", (key,))
        assert refused.would is not None
        assert refused.would.mode == "pipeline"


def test_two_cards_of_one_pc_share_evenly() -> None:
    plan = make_plan(ask(example("two-3090"), kind="lora"))

    assert plan.chosen is not None
    assert [gpu.share for gpu in plan.chosen.gpus] == [0.5, 0.5]
    assert plan.chosen.parts_s.network_s < 0.02 * plan.chosen.step_s
    (single,) = of_mode(plan, "single")
    assert single.reason.startswith("one GPU of tower: ")


def test_70b_sharded_over_gigabit_waits_for_the_network() -> None:
    """515 s of wire for each micro-step of one sequence per PC: 2 x 6/7 of 35 GB at 117.5 MB/s."""
    cluster = replace(example("seven-4070"), default_link=make_pcs("RTX 4070").default_link)
    plan = make_plan(ask(cluster, "70B", batch_sequences=7))

    (sharded,) = of_mode(plan, "sharded")
    assert "of network per step over 1 Gb/s" in sharded.reason
    assert sharded.parts_s.network_s + sharded.parts_s.compute_s == pytest.approx(515, rel=0.05)


@pytest.mark.parametrize(("memory_gib", "fits"), [(12.0, True), (8.0, True), (4.0, False)])
@pytest.mark.usefixtures("resident_only")
def test_7b_qlora_fits_cards_that_users_call_tight(memory_gib: float, fits: bool) -> None:
    node = make_node("pc", "RTX 4070", memory_gib=memory_gib)
    plan = make_plan(ask(Cluster(nodes=(node,))))

    assert (plan.chosen is not None) == fits


def test_13b_qlora_fits_12_gib() -> None:
    plan = make_plan(ask(make_pcs("RTX 4070"), "13B"))

    assert plan.chosen is not None
    assert plan.chosen.gpus[0].memory.expected_bytes <= 12 * GIB


def test_a_slow_network_makes_one_pc_faster_than_all() -> None:
    pcs = make_pcs("RTX 4090", "RTX 3060", gbit_per_s=0.01)
    plan = make_plan(ask(pcs, kind="lora"))
    asked = make_plan(ask(pcs, nodes=("pc1", "pc2")))

    assert plan.chosen is not None
    assert plan.chosen.nodes == ("pc1",)
    assert asked.chosen is not None
    assert asked.chosen.nodes == ("pc1", "pc2")
    (advice, *_) = asked.advice
    assert advice.text.startswith("Use pc1 alone: it is ")
    assert advice.change == {"nodes": ("pc1",)}


def test_the_fastest_plan_is_chosen_and_the_others_say_why_they_lost() -> None:
    plan = make_plan(ask(example("three-mismatched")))

    assert plan.chosen is not None
    runnable = [one for one in plan.others if one.fits and one.runnable]
    assert all(one.step_s >= plan.chosen.step_s for one in runnable)
    assert all(one.reason for one in (plan.chosen, *plan.others))
    assert {one.mode for one in plan.others} >= {"single", "pipeline", "sharded", "deepspeed"}


@pytest.mark.parametrize(
    ("kind", "size", "memory_gib"),
    [("full", "7B", 24.0), ("lora", "13B", 16.0), ("qlora", "13B", 8.0), ("lora", "7B", 11.0)],
)
@pytest.mark.usefixtures("resident_only")
def test_advice_makes_a_run_fit(kind: AdapterKind, size: str, memory_gib: float) -> None:
    cluster = Cluster(nodes=(make_node("pc", "RTX 3090", memory_gib=memory_gib),))
    question = ask(cluster, size, kind)
    plan = make_plan(question)

    assert plan.chosen is None
    changes = [advice.change for advice in plan.advice if advice.change]
    for change in changes[:1]:
        better = replace(question, spec=apply_change(question.spec, change))
        assert make_plan(better).chosen is not None
    assert plan.advice


@pytest.mark.usefixtures("resident_only")
def test_a_mode_that_is_not_trained_yet_is_never_chosen() -> None:
    for mode in ("sharded", "deepspeed"):
        plan = make_plan(ask(example("three-mismatched"), parallel=mode))
        assert plan.chosen is None
        assert plan.others


def test_single_takes_one_gpu() -> None:
    plan = make_plan(ask(example("three-mismatched"), parallel="single"))
    named = make_plan(ask(example("three-mismatched"), parallel="single", nodes=("gamma",)))

    assert plan.chosen is not None
    assert plan.chosen.nodes == ("alpha",)
    assert named.chosen is not None
    assert named.chosen.nodes == ("gamma",)


def test_given_shares_are_kept() -> None:
    plan = make_plan(ask(example("three-mismatched"), shares=(1.0, 1.0, 1.0)))

    assert plan.chosen is not None
    assert [gpu.share for gpu in plan.chosen.gpus] == [pytest.approx(1 / 3)] * 3


def test_time_and_energy_follow_from_steps() -> None:
    question = ask(make_pcs("RTX 4070"), epochs=3.0, batch_sequences=24)
    plan = make_plan(question)

    assert plan.chosen is not None
    assert plan.chosen.num_steps == 125
    assert plan.chosen.total_s == pytest.approx(125 * plan.chosen.step_s)
    assert plan.chosen.energy_wh == pytest.approx(0.9 * 200 * plan.chosen.total_s / 3600, rel=0.02)


def test_what_is_not_known_is_said() -> None:
    question = replace(ask(make_pcs("RTX 4070", "RTX 4070")), data=DataSize())
    plan = make_plan(replace(question, cluster=Cluster(nodes=question.cluster.nodes)))

    assert plan.chosen is not None
    assert plan.chosen.total_s is None
    assert plan.chosen.energy_wh is None
    assert any("the data was not counted" in text for text in plan.assumptions)
    assert any("assumed to be Gigabit Ethernet" in text for text in plan.assumptions)
    assert any("taken from its data sheet, not measured" in text for text in plan.assumptions)


def test_past_runs_correct_speed_memory_and_network() -> None:
    question = ask(make_pcs("RTX 4070", "RTX 4070"), kind="qlora")
    outcomes = tuple(
        RunOutcome(
            card="RTX 4070", family="llama", adapter="qlora", ended_s=float(i),
            memory_ratio=1.1, speed_ratio=0.5, network_ratio=3.0,
        )
        for i in range(9)
    )  # fmt: skip
    plain = make_plan(question).chosen
    learned = make_plan(replace(question, learned=Corrections(outcomes=outcomes))).chosen

    assert plain is not None
    assert learned is not None
    assert learned.parts_s.compute_s == pytest.approx(plain.parts_s.compute_s / 0.53, rel=0.1)
    assert learned.parts_s.network_s > 2 * plain.parts_s.network_s


def test_a_measured_link_counts() -> None:
    question = ask(make_pcs("RTX 4070", "RTX 4070"))
    slow = LinkSpeed(bytes_per_s=5e6, latency_s=0.01, source="measured")
    cluster = replace(question.cluster, links={frozenset(("pc1", "pc2")): slow})

    fast_data = of_mode(make_plan(question), "data")[0]
    slow_data = of_mode(make_plan(replace(question, cluster=cluster)), "data")[0]

    assert slow_data.parts_s.network_s > 10 * fast_data.parts_s.network_s


def test_pcs_without_gpus_train_on_their_processors() -> None:
    processor = PlannedGpu(name="CPU", device="cpu", memory_bytes=16 * GIB)
    nodes = tuple(PlannedNode(name=name, gpus=(processor,)) for name in ("one", "two"))
    shape = replace(llama("7B"), layers=llama("7B").layers[:2], vocab=1000)
    plan = make_plan(replace(ask(Cluster(nodes=nodes), kind="lora"), shape=shape))

    assert plan.chosen is not None
    assert plan.chosen.energy_wh is None
    assert {one.mode for one in plan.others} <= {"single", "data", "pipeline"}


def test_no_gpu_at_all_is_no_plan() -> None:
    bare, unknown = PlannedNode(name="pc1"), make_node("pc2", "Some GPU")
    for nodes, words in (
        ((), "There is no node: add one"),
        ((bare,), "pc1 has no GPU: add gpus to the cluster file, such as gpus: [RTX 4070]"),
        ((unknown,), "The memory of the GPUs of pc2 is not known: give it, as memory_gib"),
    ):
        plan = make_plan(ask(Cluster(nodes=nodes)))
        assert (plan.chosen, plan.others) == (None, ())
        (advice,) = plan.advice
        assert words in advice.text
    plan = make_plan(ask(Cluster(nodes=(bare, make_node("pc2", "RTX 4070")))))
    assert plan.chosen is not None
    assert "pc1 has no GPU and takes no part" in plan.assumptions


def test_a_plan_knows_where_layers_are_not_compiled_and_what_that_costs() -> None:
    nodes = tuple(
        replace(make_node(name, "RTX 4070"), has_compiler=has)
        for name, has in (("a", True), ("b", False))
    )
    plans = [make_plan(ask(Cluster(nodes=(node,)))) for node in nodes]
    compiled, plain = plans

    assert compiled.chosen is not None
    assert plain.chosen is not None
    assert plain.chosen.step_s > 1.1 * compiled.chosen.step_s
    assert compiled.limits == ()
    (limit,) = plain.limits
    assert (limit.reason, limit.nodes, limit.is_decisive) == ("no_compiler", ("b",), False)
    # The sum of what it costs this run, and not of what such layers cost in general.
    assert limit.time_ratio == pytest.approx(plain.chosen.step_s / compiled.chosen.step_s, rel=0.05)


@pytest.mark.usefixtures("resident_only")
def test_limits_name_the_reason_and_whether_the_run_would_fit() -> None:
    old = replace(make_node("a", "GTX 1080 Ti", memory_gib=11).gpus[0], capability=(6, 1))
    nodes = tuple(replace(make_node(name), gpus=(old,)) for name in ("a", "b"))
    (limit,) = make_plan(ask(Cluster(nodes=nodes))).limits
    assert (limit.reason, limit.nodes) == ("old_card", ("a", "b"))
    (offer,) = describe_limits([limit])
    assert offer.text.startswith("a and b: layers are not compiled, since Triton")
    assert "GTX 1080 Ti takes about" in offer.text

    one = Cluster(nodes=(make_node("a", "RTX 4070"),))
    (limit,) = make_plan(ask(one, compile="off")).limits
    assert limit.reason == "turned_off"
    (offer,) = describe_limits([limit])
    assert apply_change(ask(one, compile="off").spec, offer.change).compile == "auto"

    # More memory than the card has, by what uncompiled layers keep.
    bare = Cluster(nodes=(replace(one.nodes[0], has_compiler=False),))
    near = {"sequence_tokens": 1536, "recompute": "none"}
    assert make_plan(ask(one, **near)).chosen is not None
    plan = make_plan(ask(bare, **near))
    (limit,) = plan.limits
    assert (plan.chosen, limit.time_ratio, limit.is_decisive) == (None, None, True)
    assert "compiled, it would" in describe_limits([limit])[0].text


@pytest.mark.usefixtures("resident_only")
def test_what_does_not_fit_is_offered_every_kind_of_change_that_would_make_it_fit() -> None:
    tight = ask(
        Cluster(nodes=(make_node("a", "RTX 4090"),)),
        kind="lora",
        recompute="none",
        memory_gib=16.0,
        sequence_tokens=1024,
    )
    plan = make_plan(tight)
    assert plan.chosen is None
    changed = {key for advice in plan.advice for key in advice.change}
    assert {"recompute", "memory_gib", "adapter.kind", "sequence_tokens"} <= changed
    for advice in plan.advice:
        assert make_plan(replace(tight, spec=apply_change(tight.spec, advice.change))).chosen


def test_a_cpu_computes_in_the_ram_that_a_limit_leaves() -> None:
    facts = NodeFacts(
        hostname="n", os="", kernel="", python="", architecture="", cpu="AMD", num_cores=4,
        memory_bytes=GIB // 2, pc_memory_bytes=64 * GIB,
        limits=(ResourceLimit(kind="memory", amount=GIB // 2, place="/sys/fs/cgroup/memory.max"),),
    )  # fmt: skip
    plan = make_plan(ask(make_cluster({"pc": facts})))
    assert plan.chosen is None
    assert "as /sys/fs/cgroup/memory.max limits it to 0.5 GiB" in plan.others[0].reason


def test_a_memory_limit_is_one_of_gpus() -> None:
    cpu = PlannedGpu(name="CPU", device="cpu", memory_bytes=64 * GIB)
    node = PlannedNode(name="pc", gpus=(cpu,), ram_bytes=64 * GIB, system="linux")
    on_cpu = make_plan(ask(Cluster(nodes=(node,)), memory_gib=0.5))
    on_gpu = make_plan(ask(make_pcs("RTX 4090"), memory_gib=0.5, parallel="single"))

    assert on_cpu.chosen is not None
    assert on_gpu.chosen is None

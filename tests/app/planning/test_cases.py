"""Plans of clusters on which earlier versions misled their users."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.library.cluster_file import read_cluster_file
from app.planning.choice import weigh
from app.planning.hardware.cluster import ASSUMED_PC_W, Cluster, Uplink, ethernet
from app.planning.plan import DataSize, Plan, PlanRequest, make_plan
from app.planning.shape.model_shape import read_shape
from app.presentation.plan_text import describe_candidate
from tests.app.planning import random_clusters
from tests.app.planning.clusters import make_node, make_pcs

FOLDER = Path(__file__).parent / "cases"
LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {**LLAMA, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
             "num_hidden_layers": 22, "num_key_value_heads": 4},
    "7B": {**LLAMA, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32},
    "70B": {**LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    "14B": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "head_dim": 128,
            "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 8, "tie_word_embeddings": False},
    "30B-A3B": {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
                "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
                "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4,
                "tie_word_embeddings": False},
}  # fmt: skip


def plan(
    model: str, cluster: str | Cluster, *, rank: int = 16, kind: str = "qlora", **keys: Any
) -> Plan:
    """Return the plan of 5,000 chats whose lengths are distributed log-normally."""
    rng = Random(1)
    lengths = sorted(min(2048, max(16, int(rng.lognormvariate(5.6, 0.7)))) for _ in range(64))
    settings = {"sequence_tokens": 2048, "batch_sequences": 24, "epochs": 3.0, **keys}
    most = settings["sequence_tokens"]
    adapter = AdapterSpec(kind=kind, rank=rank, targets="all-linear")  # type: ignore[arg-type]
    request = PlanRequest(
        spec=RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter, **settings),
        shape=read_shape(MODELS[model]),
        data=DataSize(
            num_rows=5000, mean_tokens=sum(lengths) / 64, longest_tokens=most,
            lengths=tuple(min(one, most) for one in lengths),
        ),
        cluster=read_cluster_file(FOLDER / f"{cluster}.yaml")
        if isinstance(cluster, str)
        else cluster,
    )  # fmt: skip
    return make_plan(request)


def places(found: Plan) -> set[str]:
    assert found.chosen is not None
    return {f"{gpu.node}:{gpu.device[-1]}" for gpu in found.chosen.gpus}


def speed(found: Plan) -> float:
    assert found.chosen is not None
    return found.chosen.tokens_per_s


def test_an_optimizer_that_a_pipeline_refuses_is_a_row_and_undoing_it_is_advised() -> None:
    fits, refused = (plan("70B", "seven", optimizer=name) for name in ("adamw", "paged_adamw_8bit"))
    assert fits.chosen is not None
    assert fits.chosen.mode == "pipeline"
    (row,) = refused.refused
    assert row.keys == ("optimizer",)
    assert "optimizer: paged_adamw_8bit forbids it" in row.text
    assert row.would is not None
    assert row.would.tokens_per_s == pytest.approx(speed(fits))
    assert refused.advice[0].change == {"optimizer": "adamw"}


def test_compression_in_16_bits_excludes_no_pipeline() -> None:
    plain, smaller = (
        plan("14B", "comp-cluster", kind="lora", batch_sequences=64, compression=name)
        for name in ("none", "bf16")
    )
    assert plain.chosen is not None
    assert plain.chosen.mode == "pipeline"
    assert plain.id == smaller.id
    assert speed(plain) == pytest.approx(speed(smaller))


def test_compression_that_costs_memory_is_advised_against() -> None:
    keys: dict[str, Any] = {"rank": 8, "sequence_tokens": 1024, "batch_sequences": 64}
    plain, smaller = (plan("70B", "big70c", compression=c, **keys) for c in ("none", "bf16"))
    assert speed(plain) >= speed(smaller)
    if speed(plain) > 1.1 * speed(smaller):
        assert {"compression": "none"} in [one.change for one in smaller.advice]


@pytest.mark.parametrize(("cluster", "best"), [("small-first", "strong:0"), ("8-24", "one:1")])
def test_one_gpu_is_the_best_one_wherever_it_is_listed(cluster: str, best: str) -> None:
    assert places(plan("14B", cluster, parallel="single")) == {best}


def test_a_small_gpu_of_the_only_pc_is_left_out() -> None:
    for model in ("70B", "14B"):
        found = plan(model, "24-8")
        assert places(found) == {"one:0"}
        assert not any("leave" in one.text or "nodes" in one.change for one in found.advice)


def test_a_ring_follows_its_cables_and_not_the_order_of_the_file() -> None:
    found = plan("7B", "ring", rank=64)
    assert found.chosen is not None
    assert found.chosen.mode == "data"
    names = [gpu.node for gpu in found.chosen.gpus]
    pairs = {frozenset(pair) for pair in zip(names, [*names[1:], names[0]], strict=True)}
    assert pairs == {frozenset(pair) for pair in ("ab", "bc", "cd", "da")}


def test_an_order_that_the_links_decide_is_explained() -> None:
    nodes = tuple(make_node(name, "RTX 4070") for name in "abcd")
    cables = {frozenset(pair): ethernet(10) for pair in ("ac", "cb", "bd", "da")}
    crossed = Cluster(nodes=nodes, links=cables, default_link=ethernet(0.5))
    for mode, what in (("data", "the ring is"), ("pipeline", "stages are")):
        chosen = plan("7B", crossed, rank=64, parallel=mode, nodes=tuple("abcd")).chosen
        assert chosen is not None
        assert f"{what} ordered" in chosen.reason
        uniform = Cluster(nodes=nodes, default_link=ethernet(10))
        chosen = plan("7B", uniform, rank=64, parallel=mode, nodes=tuple("abcd")).chosen
        assert chosen is not None
        assert "ordered" not in chosen.reason


@pytest.mark.parametrize("model", ["tiny", "14B"])
def test_the_order_of_a_cluster_file_changes_nothing(model: str) -> None:
    one, other = plan(model, "ord1"), plan(model, "ord2")
    assert one.id == other.id
    assert one.chosen == other.chosen


def test_the_best_set_of_pcs_is_found_among_five() -> None:
    every = plan("tiny", "miss-subset", batch_sequences=16)
    alone = plan("tiny", "miss-subset", batch_sequences=16, nodes=("b",))
    assert every.chosen is not None
    assert alone.chosen is not None
    assert every.chosen.step_s <= alone.chosen.step_s * 1.001


@pytest.mark.parametrize(
    ("model", "cluster"), [("30B-A3B", "three"), ("30B-A3B", "4090-3060"), ("tiny", "4090-3060")]
)
def test_the_headline_is_the_plan_of_exactly_its_gpus(model: str, cluster: str) -> None:
    every = plan(model, cluster)
    assert every.chosen is not None
    demanded = plan(model, cluster, nodes=tuple(sorted(places(every))))
    assert demanded.id == every.id
    assert speed(demanded) == pytest.approx(speed(every))


@pytest.mark.parametrize("seed", [60, 80])
def test_streaming_is_compared_where_gpus_would_offload_activations(seed: int) -> None:
    request = random_clusters.draw_request(seed)
    before = make_plan(request).chosen
    after = make_plan(random_clusters.add_gpu(request, seed)).chosen
    assert before is not None
    assert after is not None
    assert weigh(after) <= 1.01 * weigh(before)


def test_nothing_is_planned_with_an_infinite_time() -> None:
    found = plan("tiny", "three")
    for one in (found.chosen, *found.others):
        assert one is not None
        assert math.isfinite(one.step_s)
        assert replace(one, reason="") != one


def test_a_lower_power_limit_is_slower_and_needs_less_energy() -> None:
    plans = [plan("7B", f"pw{watts}").chosen for watts in (100, 200, 350)]
    speeds = [one.tokens_per_s for one in plans if one is not None]
    energies = [one.energy_wh for one in plans if one is not None and one.energy_wh is not None]
    assert len(speeds) == len(energies) == 3
    assert speeds == sorted(set(speeds))
    assert energies == sorted(set(energies))


def test_ten_cards_without_tensor_cores_are_slower_than_one_with() -> None:
    ten = Cluster(nodes=tuple(make_node(f"pc{i}", "GTX 1060") for i in range(10)))
    one = Cluster(nodes=(make_node("pc0", "RTX 4070"),))
    assert speed(plan("tiny", ten)) < speed(plan("tiny", one))


def test_a_slow_eleventh_pc_is_left_out() -> None:
    fast = tuple(make_node(f"pc{i}", "RTX 4070") for i in range(10))
    slow = make_node("slow", "GTX 1050 Ti")
    links = {frozenset(("slow", node.name)): ethernet(0.1) for node in fast}
    alone = Cluster(nodes=fast, default_link=ethernet(2.5))
    both = Cluster(nodes=(*fast, slow), links=links, default_link=ethernet(2.5))
    found = plan("tiny", both, batch_sequences=64)
    assert speed(found) >= speed(plan("tiny", alone, batch_sequences=64))
    assert "slow:0" not in places(found)


def test_no_link_is_in_use_for_longer_than_a_step() -> None:
    for gbit in (0.05, 0.5, 10.0):
        pcs = make_pcs(*["RTX 4070"] * 4, gbit_per_s=gbit)
        for one in [(found := plan("14B", pcs, parallel="pipeline")).chosen, *found.others]:
            if one is not None and one.wire_s is not None:
                assert one.wire_s <= one.step_s


def test_gpus_behind_one_uplink_share_it() -> None:
    names = ("a", "b", "c", "d")
    nodes = tuple(make_node(name, "RTX 4070") for name in names)
    plain = Cluster(nodes=nodes, default_link=ethernet(10))
    uplink = Uplink(nodes=frozenset("ac"), bytes_per_s=ethernet(1).bytes_per_s)
    shared = replace(plain, uplinks=(uplink,))
    slow = Cluster(nodes=nodes, default_link=ethernet(1))
    keys: dict[str, Any] = {"rank": 64, "parallel": "data", "nodes": names}
    found = plan("7B", shared, **keys)
    assert speed(plan("7B", plain, **keys)) > speed(found)
    # A ring crosses it once in each direction, whatever the order of the names.
    assert speed(found) == pytest.approx(speed(plan("7B", slow, **keys)))


def test_the_price_of_a_run_counts_the_whole_pcs() -> None:
    found = plan("7B", Cluster(nodes=(make_node("a", "RTX 3090"),), price_per_kwh=0.5))
    one = found.chosen
    assert one is not None
    assert one.energy_wh is not None
    assert one.total_s is not None
    whole_wh = one.energy_wh + ASSUMED_PC_W * one.total_s / 3600
    assert one.pc_energy_wh == pytest.approx(whole_wh)
    assert one.cost == pytest.approx(0.5 * whole_wh / 1000)
    assert any(f"{ASSUMED_PC_W:g} W" in text for text in found.assumptions)


def test_unknown_ram_is_an_assumption() -> None:
    node = replace(make_node("a", "RTX 3090"), ram_bytes=None)
    found = plan("7B", Cluster(nodes=(node,)))
    assert any("RAM is not known" in text for text in found.assumptions)


def test_what_is_missing_is_always_said() -> None:
    cluster = Cluster(nodes=(make_node("a", "RTX 3090"), make_node("b", "RTX 4060")))
    for mode in ("auto", "single", "data", "streamed"):
        for nodes in ("all", ("a", "b")):
            found = plan("70B", cluster, kind="full", parallel=mode, nodes=nodes)
            for one in found.advice:
                assert "needs ," not in one.text
                assert "needs  " not in one.text


def test_a_batch_that_fills_every_card_is_advised() -> None:
    found = plan("tiny", "seven")
    assert {"batch_sequences": 28} in [one.change for one in found.advice]
    assert speed(plan("tiny", "seven", batch_sequences=28)) > 1.05 * speed(found)


def test_the_largest_rank_that_fits_is_advised() -> None:
    found = plan("7B", "seven", rank=5000, parallel="data")
    (rank,) = [one.change["adapter.rank"] for one in found.advice if "adapter.rank" in one.change]
    assert isinstance(rank, int)
    assert plan("7B", "seven", rank=rank, parallel="data").chosen is not None
    assert plan("7B", "seven", rank=2 * rank, parallel="data").chosen is None


def test_steps_from_an_estimated_number_of_rows_are_shown_as_about() -> None:
    exact = plan("tiny", "seven").chosen
    assert exact is not None
    assert "about" not in dict(describe_candidate(exact))["Total time"]
    guessed = dict(describe_candidate(replace(exact, has_estimated_steps=True)))["Total time"]
    assert guessed.count("about") == 2

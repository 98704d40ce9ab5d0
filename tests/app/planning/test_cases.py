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
from app.planning.plan import DataSize, Plan, PlanRequest, make_plan
from app.planning.shape.model_shape import read_shape

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


def plan(model: str, cluster: str, *, rank: int = 16, kind: str = "qlora", **keys: Any) -> Plan:
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
        cluster=read_cluster_file(FOLDER / f"{cluster}.yaml"),
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


def test_nothing_is_planned_with_an_infinite_time() -> None:
    found = plan("tiny", "three")
    for one in (found.chosen, *found.others):
        assert one is not None
        assert math.isfinite(one.step_s)
        assert replace(one, reason="") != one

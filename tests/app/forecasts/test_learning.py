"""What a run teaches: forecast and measurement are stored at its end, and correct the next plan."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.messages import to_wire
from agents.contract.node import GpuFacts
from agents.contract.spec import RunSpec
from app.forecasts.learning import compare_run, load_corrections, store_counted, store_links
from app.library.data_key import make_data_key
from app.planning.accuracy.forecast_accuracy import Forecast, RankForecast
from app.planning.memory.forecast import MemorySetting
from app.planning.memory.gpu import GpuMemory
from app.provisioning.check_row import CheckRow
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_facts, make_preview
from tests.fakes.models import write_model

CARD = "NVIDIA GeForce RTX 3090"
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def journal(num_steps: int) -> bytes:
    lines = [
        {"kind": "setting", "micro_tokens": 512, "num_recomputed": 1, "num_moved": 0},
        {"kind": "started", "step": 0, "total_steps": num_steps, "shares": [1.0]},
    ]
    for step in range(1, num_steps + 1):
        figures = {"tokens": 900, "step_s": 1.2, "compute_s": 1.0, "wait_s": 0.1}
        lines.append({
            "kind": "step", "step": step, "time_s": 1000.0 + step, "loss": 2.0,
            "memory_bytes": 9_000_000, "tokens_per_s": 750.0, **figures,
        })  # fmt: skip
    return "".join(json.dumps({"time_s": 1.0, **line}) + "\n" for line in lines).encode()


async def run_to_its_end(services: Services, cluster: FakeCluster, spec: RunSpec) -> str:
    node = cluster.nodes["alpha"]
    node.facts_now = make_facts(gpus=(GpuFacts(uuid="GPU-1", index=0, name=CARD),))
    run_id = await start_run(services, replace(spec, nodes=("alpha",)))
    told = Forecast(
        mode="single",
        family="llama",
        adapter="lora",
        longest_tokens=512,
        ranks=(
            RankForecast(
                node="alpha",
                device="cuda:0",
                card=CARD,
                tokens_per_s=1000.0,
                gpu=GpuMemory(total_bytes=24 << 30),
            ),
        ),
    )
    services.planning.save_forecast(run_id, 1, to_wire(told))
    node.write(run_id, 1, "rank-0.jsonl", journal(12))
    node.set_state(run_id, 1, "done")
    await reconcile_run(services, run_id)
    return run_id


def test_the_end_of_a_run_teaches_the_next_plan(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    write_model(Path(spec.model), **CONFIG)
    assert load_corrections(services.planning).outcomes == ()
    run_id = asyncio.run(run_to_its_end(services, cluster, spec))
    found = compare_run(services, services.runs.get(run_id))
    assert found is not None
    assert found.measured is not None
    rank = found.measured.ranks[0]
    assert rank.tokens_per_s == pytest.approx(900.0)
    assert rank.setting == MemorySetting(micro_tokens=512, num_recomputed=1)
    assert (found.measured.num_steps, found.measured.step_s) == (12, 1.2)
    assert found.measured.network_s is None  # nobody to wait for
    corrections = load_corrections(services.planning)
    speed = corrections.find(CARD, "llama", "lora").speed
    assert speed.value == pytest.approx((0.9 + 0.5) / 1.5)
    assert corrections.find(CARD, "llama", "lora").memory.num_runs == 1


def test_a_model_without_a_shape_teaches_nothing_and_hurts_nobody(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    Path(spec.model, "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    run_id = asyncio.run(run_to_its_end(services, cluster, spec))
    assert services.runs.get(run_id).state == "done"
    assert load_corrections(services.planning).outcomes == ()


def test_only_ways_between_two_nodes_are_kept(services: Services) -> None:
    row = CheckRow(
        check="tcp", node="a", peer="b", status="pass", message="", round_trip_s=3e-4,
        bytes_per_s=1.1e8,
    )  # fmt: skip
    store_links(
        services.planning,
        [row, replace(row, peer="a"), replace(row, peer=None), replace(row, round_trip_s=None)],
    )
    assert [(link.node, link.peer) for link in services.planning.links()] == [("a", "b")]


def test_only_data_that_was_counted_whole_is_kept(services: Services, spec: RunSpec) -> None:
    store_counted(services.planning, spec, make_preview(whole=False))
    assert services.planning.counted(make_data_key(spec)) is None
    store_counted(services.planning, spec, make_preview())
    counted = services.planning.counted(make_data_key(spec))
    assert counted is not None
    assert (counted.num_rows, counted.num_tokens, counted.longest_tokens) == (2, 10, 5)
    assert services.planning.counted(make_data_key(replace(spec, sequence_tokens=9))) is None

"""What is asked of a running run, over nodes that grant it, fail, or end meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.run import ControlRequest
from agents.contract.spec import RunSpec
from app.errors import NodeUnreachable, UsageError, UserError
from app.events import SaveResult
from app.runs.lifecycle import control_requests, waiting
from app.runs.lifecycle.launch import start_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster


@pytest.fixture
def run_id(services: Services, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(waiting, "POLL_INTERVAL_S", 0.01)
    return asyncio.run(start_run(services, spec))


def answer(cluster: FakeCluster, *lines: dict[str, Any], node: str = "alpha") -> None:
    """Let the trainer on alpha write these lines when it is asked for something."""

    def grant(run_id: str, attempt: int, wish: ControlRequest) -> None:
        for line in ({"kind": "wish", "wish_id": wish.wish_id, "step": 7}, *lines):
            cluster["alpha"].write(
                run_id, attempt, "rank-0.jsonl", json.dumps(line).encode() + b"\n"
            )

    cluster[node].grant = grant


def test_a_checkpoint_that_is_asked_for_is_told_with_its_stall(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    answer(cluster, {"kind": "checkpoint", "step": 7, "seconds": 1.5, "stall_s": 0.03})
    saved = asyncio.run(control_requests.save_now(services, run_id))
    assert saved == SaveResult(step=7, stall_s=0.03, seconds=1.5)
    assert [wish.kind for wish in cluster["alpha"].wishes] == ["save"]
    assert not cluster["beta"].wishes
    texts = [event.text for event in services.runs.events(run_id)]
    assert "checkpoint requested" in texts
    assert any("training paused for 30 ms" in text for text in texts)


def test_a_refusing_disk_is_told(services: Services, cluster: FakeCluster, run_id: str) -> None:
    answer(cluster, {"kind": "checkpoint_failed", "step": 7, "message": "The disk is full."})
    with pytest.raises(UserError, match="could not save after step 7: The disk is full"):
        asyncio.run(control_requests.save_now(services, run_id))
    assert any(
        "could not be saved on alpha" in event.text for event in services.runs.events(run_id)
    )


def test_patience_ends_with_what_is_known(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_requests, "ANSWER_TIMEOUT_S", 0.05)
    assert asyncio.run(control_requests.save_now(services, run_id)) == SaveResult(step=None)
    answer(cluster)
    assert asyncio.run(control_requests.save_now(services, run_id)) == SaveResult(step=7)


def test_a_run_that_ends_meanwhile_is_told(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "JUDGE_INTERVAL_S", 0.0)

    def end(run_id: str, attempt: int, wish: ControlRequest) -> None:
        for node in cluster.nodes.values():
            node.set_state(run_id, attempt, "done")

    cluster["alpha"].grant = end
    with pytest.raises(UserError, match="ended before it could do that: it is done"):
        asyncio.run(control_requests.save_now(services, run_id))


def test_only_a_running_run_can_save(services: Services, cluster: FakeCluster, run_id: str) -> None:
    for node in cluster.nodes.values():
        node.set_state(run_id, 1, "stopped")
    with pytest.raises(UserError, match="is stopped: only a running run can save") as refused:
        asyncio.run(control_requests.save_now(services, run_id))
    assert refused.value.hint == f"Resume it first: rackless runs resume {run_id}"
    assert not cluster["alpha"].wishes


def test_a_first_node_that_is_silent_is_told(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["alpha"].reachable = False
    for name in ("beta", "gamma"):
        cluster[name].set_rank(run_id, 1, phase="training", step=5, heartbeat_age_s=0.2)
    with pytest.raises(NodeUnreachable):
        asyncio.run(control_requests.save_now(services, run_id))


def test_traces_of_all_ranks_are_fetched_with_what_took_longest(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    data = b"a gzipped trace"

    def grant(run_id: str, attempt: int, wish: ControlRequest) -> None:
        assert (wish.kind, wish.num_steps) == ("trace", 2)
        granted = {"kind": "wish", "wish_id": wish.wish_id, "step": 7}
        cluster["alpha"].write(
            run_id, attempt, "rank-0.jsonl", json.dumps(granted).encode() + b"\n"
        )
        for rank, name in enumerate(("alpha", "beta", "gamma")):
            file = f"trace-00000008-rank-{rank}.json.gz"
            line = {
                "kind": "trace",
                "first_step": 8,
                "last_step": 9,
                "file": file,
                "size_bytes": len(data),
                "top": [{"name": "aten::mm", "count": 4, "seconds": 0.5, "share": 0.9}],
            }
            if name == "gamma":
                line = {"kind": "trace_failed", "first_step": 8, "message": "The disk is full."}
            else:
                cluster[name].write(run_id, attempt, file, data)
            journal = f"rank-{rank}.jsonl"
            cluster[name].write(run_id, attempt, journal, json.dumps(line).encode() + b"\n")

    cluster["alpha"].grant = grant
    made = asyncio.run(control_requests.record_trace(services, run_id, 2))
    assert (made.first_step, made.is_complete) == (8, True)
    assert [Path(trace.path).read_bytes() for trace in made.ranks[:2]] == [data, data]
    assert made.ranks[2].problem == "The disk is full."
    assert [(row.name, row.count, row.share) for row in made.ranks[0].top] == [("aten::mm", 4, 0.9)]
    texts = [event.text for event in services.runs.events(run_id)]
    file = "trace-00000008-rank-1.json.gz"
    assert (
        f"rank 1 on beta recorded steps 8 to 9 ({file}, 15 B); slowest operation: aten::mm (90 %)"
        in texts
    )
    assert "rank 2 on gamma could not record a trace: The disk is full." in texts


def test_a_trace_that_is_still_recorded_when_patience_ends_is_told(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_requests, "ANSWER_TIMEOUT_S", 0.05)
    answer(cluster)
    made = asyncio.run(control_requests.record_trace(services, run_id, 3))
    assert (made.first_step, made.ranks, made.is_complete) == (8, (), False)


@pytest.mark.parametrize("num_steps", [0, 21])
def test_too_many_steps_are_refused(services: Services, run_id: str, num_steps: int) -> None:
    with pytest.raises(UsageError, match="choose 1 to 20"):
        asyncio.run(control_requests.record_trace(services, run_id, num_steps))

"""A verified resume begins where enough steps are logged, and hands them to the trainer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agents.contract.spec import RunSpec
from app.errors import UsageError, UserError
from app.presentation.result_text import describe_certificate
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.stop import stop_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster
from tests.fakes.resuming import resume_run


def log(cluster: FakeCluster, run_id: str, attempt: int, *lines: dict[str, Any]) -> None:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    cluster["alpha"].write(run_id, attempt, "rank-0.jsonl", data)


def step_line(step: int, loss: float) -> dict[str, Any]:
    fields = {"loss": loss, "loss_hex": loss.hex(), "samples": f"rows {step}"}
    return {"kind": "step", "step": step, "time_s": float(step), "shares": [2.0, 1, 1], **fields}


@pytest.fixture
def stopped(services: Services, cluster: FakeCluster, spec: RunSpec) -> str:
    """A run with checkpoints of steps 5 and 10, stopped after step 12."""
    run_id = asyncio.run(start_run(services, spec))
    log(cluster, run_id, 1, {"kind": "started", "step": 0, "total_steps": 30})
    log(cluster, run_id, 1, *(step_line(step, 3.0 / step) for step in range(1, 13)))
    log(cluster, run_id, 1, {"kind": "checkpoint", "step": 10, "seconds": 1.0, "stall_s": 0.1})
    for step in (5, 10):
        cluster["alpha"].add_checkpoint(run_id, step)
    asyncio.run(stop_run(services, run_id))
    return run_id


@pytest.mark.parametrize(("num_steps", "start"), [(2, 10), (3, 5), (7, 5)])
def test_it_begins_at_the_newest_checkpoint_with_enough_steps_after_it(
    services: Services, cluster: FakeCluster, stopped: str, num_steps: int, start: int
) -> None:
    asyncio.run(resume_run(services, stopped, verify_steps=num_steps))
    intent = cluster["beta"].intents[-1]
    assert intent.resume_step == start
    assert intent.replay is not None
    steps = [one.step for one in intent.replay.steps]
    assert steps == list(range(start + 1, start + num_steps + 1))
    first = intent.replay.steps[0]
    assert float.fromhex(first.loss_hex) == 3.0 / (start + 1)
    assert (first.samples, first.shares) == (f"rows {start + 1}", (2.0, 1.0, 1.0))
    saved = [one.step for one in intent.replay.steps if one.saved]
    assert saved == ([10] if num_steps == 7 else [])
    assert intent.replay.devices == tuple((r.node, r.device_id) for r in intent.ranks)


def test_too_few_logged_steps_are_told_before_anything_is_deleted(
    services: Services, cluster: FakeCluster, stopped: str
) -> None:
    with pytest.raises(UserError, match="has 8 logged steps after it; the maximum is 7") as refused:
        asyncio.run(resume_run(services, stopped, verify_steps=8))
    assert refused.value.hint == "Verify fewer: --verify 7"
    with pytest.raises(UserError, match=r"step 10 of .* has 2 logged steps after it") as refused:
        asyncio.run(resume_run(services, stopped, checkpoint=10, verify_steps=3))
    assert refused.value.hint.startswith("Verify fewer: --verify 2, or leave out --checkpoint")
    with pytest.raises(UserError, match="no checkpoint of step 7 of") as refused:
        asyncio.run(resume_run(services, stopped, checkpoint=7, verify_steps=2))
    assert refused.value.hint == "Available steps: 10, 5"
    with pytest.raises(UsageError, match="0 steps cannot be replayed"):
        asyncio.run(resume_run(services, stopped, verify_steps=0))
    assert {step for _, step in cluster["alpha"].checkpoints} == {5, 10}
    assert services.runs.get(stopped).state == "stopped"


def test_damaged_checkpoint_that_alone_can_be_verified_is_no_reason_to_start_again(
    services: Services, cluster: FakeCluster, stopped: str
) -> None:
    cluster["alpha"].damaged.add(5)
    with pytest.raises(UserError, match="with 7 logged steps after it: step 5 on alpha") as refused:
        asyncio.run(resume_run(services, stopped, verify_steps=7))
    assert refused.value.hint.startswith("Resume without verification")
    assert {step for _, step in cluster["alpha"].checkpoints} == {5, 10}
    assert services.runs.get(stopped).state == "stopped"


def test_steps_of_two_attempts_on_other_devices_promise_no_bits(
    services: Services, cluster: FakeCluster, stopped: str
) -> None:
    asyncio.run(resume_run(services, stopped, checkpoint=10, nodes=("alpha", "beta")))
    log(cluster, stopped, 2, {"kind": "started", "step": 10, "total_steps": 30})
    log(cluster, stopped, 2, *(step_line(step, 9.0 / step) for step in (11, 12)))
    asyncio.run(stop_run(services, stopped))
    asyncio.run(resume_run(services, stopped, verify_steps=7))
    replay = cluster["alpha"].intents[-1].replay
    assert replay is not None
    assert replay.devices == ()
    assert float.fromhex(replay.steps[-1].loss_hex) == 9.0 / 12, "what attempt 1 did then is void"


@pytest.mark.parametrize(
    ("changes", "words", "severity"),
    [
        ({"equal_to_the_bit": True}, "bit-exact", "info"),
        ({"promise": "B", "largest_difference": 3e-7}, "3.0e-07, as expected on different", "info"),
        ({"kept": False, "largest_difference": 0.2}, "expected: identical losses", "error"),
        ({"promise": "B", "kept": False, "largest_difference": 0.2}, "within rounding", "error"),
        ({"kept": False, "other_samples": 2}, "MISMATCH: 2 steps saw different", "error"),
    ],
)
def test_a_certificate_is_told_in_words(
    services: Services,
    cluster: FakeCluster,
    stopped: str,
    changes: dict[str, Any],
    words: str,
    severity: str,
) -> None:
    line = {
        "kind": "certificate",
        "promise": "A",
        "first_step": 11,
        "last_step": 12,
        "steps": 2,
        "equal_to_the_bit": False,
        "largest_difference": 0.0,
        "other_samples": 0,
        "kept": True,
    }
    asyncio.run(resume_run(services, stopped, verify_steps=2))
    log(cluster, stopped, 2, {**line, **changes})
    asyncio.run(stop_run(services, stopped))
    run = services.runs.full_snapshot(stopped)
    assert run.certificate is not None
    assert words in describe_certificate(run.certificate)
    told = [event for event in services.runs.events(stopped) if "replayed" in event.text]
    assert [event.severity for event in told] == [severity]

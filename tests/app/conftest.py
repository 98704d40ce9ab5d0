"""A run's services over fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections import namedtuple
from pathlib import Path

import pytest

from agents.contract.spec import CheckpointSpec, DataSpec, RunSpec
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.models import write_model


@pytest.fixture(autouse=True)
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is free on this PC's disk, as exports see it; a test changes it."""
    free = [1 << 40]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        "app.artifacts.exports.place.disk_usage", lambda path: usage(1 << 41, 0, free[0])
    )
    return free


@pytest.fixture(autouse=True)
def counts_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start runs without the process that counts their rows; its own tests put it back."""

    async def count(*args: object) -> tuple[()]:
        return ()

    monkeypatch.setattr("app.runs.inputs.left_out.count_before_sending", count)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("alpha", "beta", "gamma")


@pytest.fixture
def services(tmp_path: Path, cluster: FakeCluster) -> Services:
    return make_services(tmp_path / "home", cluster)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """A run whose model and data lie on this PC."""
    model = write_model(tmp_path / "model")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"text": "hello"}) + "\n")
    return RunSpec(
        model=str(model),
        data=DataSpec(train=str(data)),
        checkpoint=CheckpointSpec(every_steps=5, copies=2),
    )


@pytest.fixture
def run_id(services: Services, spec: RunSpec) -> str:
    """A run that is under way on all three nodes."""
    return asyncio.run(start_run(services, spec))


@pytest.fixture
def interrupted(services: Services, cluster: FakeCluster, run_id: str) -> str:
    """The run after gamma was lost, with checkpoints 5 and 10 on alpha and beta."""
    for name in ("alpha", "beta"):
        for step in (5, 10):
            cluster[name].add_checkpoint(run_id, step)
    cluster["gamma"].set_state(run_id, 1, "lost")
    asyncio.run(reconcile_run(services, run_id))
    cluster["gamma"].reachable = False
    return run_id

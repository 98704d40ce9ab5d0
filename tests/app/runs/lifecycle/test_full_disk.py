"""A full disk of this PC interrupts no run and no watch; both go on when there is room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.contract.spec import RunSpec
from app.events import Event, EventHub, RunEventArrived
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.watch import RunWatch
from app.runs.services import Services
from tests.agents.small_disk import fill, small_disk
from tests.fakes.cluster import FakeCluster, make_services


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        yield disk


@pytest.fixture
def services(disk: Path, cluster: FakeCluster) -> Services:
    return make_services(disk / "home", cluster)


def step_line(step: int) -> bytes:
    record = {"kind": "step", "time_s": float(step), "step": step, "loss": 1.0}
    return json.dumps(record).encode() + b"\n"


async def test_full_disk_of_the_master_is_one_warning_and_the_watch_goes_on(
    services: Services, cluster: FakeCluster, spec: RunSpec, disk: Path
) -> None:
    """It once ended the watch with the traceback of a group of exceptions."""
    run_id = await start_run(services, spec)
    told: list[Event] = []
    hub = EventHub()
    with hub.listening(told.append):
        watch = asyncio.create_task(
            RunWatch(services, services.runs.get(run_id), hub).run_until_end()
        )
        filler = fill(disk)
        for step in range(1, 400):
            cluster["alpha"].write(run_id, 1, "rank-0.jsonl", step_line(step))
        for name in cluster.names():
            cluster[name].set_state(run_id, 1, "done")
        await asyncio.sleep(2.5)
        assert not watch.done()
        warnings = [e.event for e in told if isinstance(e, RunEventArrived)]
        assert warnings
        assert all(event.kind == "warning" for event in warnings)
        texts = [event.text for event in warnings]
        assert len(texts) == len(set(texts)) <= 2, "one for the logs, one for the state"
        filler.unlink()
        await asyncio.wait_for(watch, 20)
    assert services.runs.get(run_id).state == "done"
    assert services.runs.history(run_id).attempt(1).ranks[0].step == 399

"""A core that stays open never lives on a store that is lost, and lives through a busy one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.spec import RunSpec
from app.errors import StoreLost, UserError
from app.events import EventHub, RunEventArrived, StoreFailed
from app.nodes.fleet import Fleet
from app.runs.lifecycle import background_tasks
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.watch import RunWatch
from app.runs.run_repository import RunRepository
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services

LOST = StoreLost("the database was replaced", "Start it again.")


class Store:
    """Database whose checks give these answers, and then none."""

    def __init__(self, *answers: UserError) -> None:
        self._answers = list(answers)

    def require_present(self) -> None:
        if self._answers:
            raise self._answers.pop(0)

    def require_intact(self) -> None: ...

    def version_of_data(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tasks, "STORAGE_POLL_S", 0.01)


async def until_failed(services: Services, home: Path, store: Store) -> StoreFailed:
    """Return the report of the lost store; no task may be left."""
    hub, told = EventHub(), asyncio.Queue[StoreFailed]()
    tasks = BackgroundTasks(services, Fleet(home, hub), None, store, hub)  # type: ignore[arg-type]
    with hub.listening(lambda e: told.put_nowait(e) if isinstance(e, StoreFailed) else None):
        tasks.begin()
        async with asyncio.timeout(60):
            failed = await told.get()
            await asyncio.wait(tasks._tasks.values())
    assert told.empty(), "told once"
    return failed


async def test_a_lost_store_ends_every_task_with_its_reason(
    services: Services, run_id: str, tmp_path: Path
) -> None:
    failed = await until_failed(services, tmp_path, Store(LOST))
    assert (failed.message, failed.hint) == (LOST.message, LOST.hint)


async def test_a_busy_store_is_named_once_and_tried_again(
    services: Services, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = UserError("rackless.sqlite3 is locked", "Close other programs.")
    with caplog.at_level(logging.WARNING):
        await until_failed(services, tmp_path, Store(busy, busy, busy, LOST))
    (said,) = [text for text in caplog.messages if "is locked" in text]
    assert said.endswith("It is tried again.")


async def test_damage_that_another_task_meets_is_told_as_well(
    services: Services, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = services.runs.store

    def broken(run: str) -> None:
        raise LOST

    async def begin_then_break() -> StoreFailed:
        monkeypatch.setattr(type(store), "get", lambda self, run: broken(run))
        return await until_failed(services, tmp_path, Store())

    assert (await begin_then_break()).message == LOST.message


async def test_a_task_that_a_busy_store_ended_is_named_once_and_begun_again(
    services: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = 0

    async def busy(self: BackgroundTasks) -> None:
        nonlocal begun
        begun += 1
        if begun == 3:
            raise LOST
        raise UserError("rackless.sqlite3 is locked", "Close other programs.")

    monkeypatch.setattr(BackgroundTasks, "_follow_nodes", busy)
    with caplog.at_level(logging.WARNING):
        await until_failed(services, tmp_path, Store())
    assert begun == 3
    assert len(caplog.messages) == 1
    assert "bug" not in caplog.text


async def test_of_two_processes_that_watch_each_tells_all(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    """One was silent about what the other had stored first, such as the end of a rank."""
    run_id = await start_run(services, spec)
    other, hub = make_services(services.paths.home, cluster), EventHub()
    runs = RunRepository(other.paths, other.runs.store, other.recoveries, hub)
    other = replace(other, runs=runs)
    other.runs.history(run_id)  # what it knows from the start is not told
    told = asyncio.Queue[str]()
    ended = b'{"kind": "rank_exited", "time_s": 1, "rank": 0, "exit_code": -9}\n'

    async def wait_for(text: str) -> None:
        while text not in await told.get():
            pass

    with hub.listening(lambda e: told.put_nowait(e.event.text) if _is_event(e) else None):
        watch = asyncio.create_task(RunWatch(other, other.runs.get(run_id), hub).run_until_end())
        async with asyncio.timeout(60):
            # Stored by the first process, and never sent to the second one.
            mirror = services.runs.mirror(run_id, 1, "alpha")
            mirror.append("supervisor.jsonl", 0, ended)
            await wait_for("rank 0 on node alpha was ended by signal 9")
            other.runs.follow_events()
            other.runs.add_event(run_id, "note", "mine")
            services.runs.add_event(run_id, "interrupted", "its own")
            other.runs.publish_changed()
            await wait_for("mine")
            await wait_for("its own")
        assert told.empty(), "once"
        watch.cancel()


def _is_event(event: object) -> bool:
    return isinstance(event, RunEventArrived)


async def test_events_after_those_of_a_deleted_run_are_told(
    services: Services, run_id: str, cluster: FakeCluster, spec: RunSpec
) -> None:
    hub = EventHub()
    runs = RunRepository(services.paths, services.runs.store, services.recoveries, hub)
    runs.follow_events()
    for number in range(5):
        services.runs.add_event(run_id, "note", f"old {number}")
    runs.publish_changed()
    for name in cluster.names():
        cluster[name].set_state(run_id, 1, "done")
    services.runs.forget(run_id)
    runs.publish_changed()
    newer = await start_run(services, spec)
    runs.publish_changed()
    told: list[str] = []
    with hub.listening(lambda e: told.append(e.event.text) if _is_event(e) else None):
        services.runs.add_event(newer, "note", "new")
        runs.publish_changed()
    assert told == ["new"]

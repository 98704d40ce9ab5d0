"""A core that stays open never lives on a store that is lost, and lives through a busy one."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from app.errors import StoreLost, UserError
from app.events import EventHub, StoreFailed
from app.nodes.fleet import Fleet
from app.runs.lifecycle import background_tasks
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.services import Services

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

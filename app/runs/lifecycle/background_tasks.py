"""Background tasks of a core that stays open: watch and recover runs, notice nodes and processes.

A command that sends one request and exits does not start them. Each job is a separate task; one
that fails by a bug is logged and leaves the others running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from app.errors import StoreLost, UserError, describe_error
from app.events import ACTIVE_STATES, ArtifactsChanged, Event, EventHub, NodeChanged, StoreFailed
from app.nodes.fleet import Fleet
from app.nodes.node import node_from_json
from app.runs.lifecycle.reconcile import search_nodes
from app.runs.lifecycle.watch import RunWatch
from app.runs.services import Services
from app.storage.database import Database
from app.storage.nodes import NodeStore

# `PRAGMA data_version` costs microseconds; a run that the command line started shows within a
# second.
STORAGE_POLL_S = 1.0
INTACT_POLL_S = 30.0
"""Time between two checks of the whole database, in seconds; each reads a few MB."""
_log = logging.getLogger(__name__)


class BackgroundTasks:
    def __init__(
        self,
        services: Services,
        fleet: Fleet,
        nodes: NodeStore,
        database: Database,
        events: EventHub,
    ) -> None:
        self._services = services
        self._fleet = fleet
        self._nodes = nodes
        self._database = database
        self._events = events
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.is_on = False
        self.failure: StoreLost | None = None
        """Loss of the store, which has ended all tasks; None: it is in use."""
        self._said = ""

    def begin(self) -> None:
        """Watch every active run, nodes and the database from now on. Idempotent."""
        if not self.is_on:
            self.is_on = True
            self._spawn("nodes", self._follow_nodes())
            self._spawn("storage", self._follow_storage())
        self._watch_active()

    def run_beside(self, key: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the core is closed; finished work of the same key is replaced."""
        task = self._tasks.get(key)
        if task is None or task.done():
            self._spawn(key, work)
        else:
            work.close()

    def watch(self, run_id: str) -> asyncio.Task[None]:
        """Return the task that watches the run until its final end; start it if missing.

        After an attempt that lost a rank or a node, it watches the attempt that recovers the run.
        """
        key = f"run {run_id}"
        task = self._tasks.get(key)
        # A run that the user resumes needs a new watch.
        if task is None or task.done():
            task = self._spawn(key, self._watch_and_recover(run_id))
        return task

    async def _watch_and_recover(self, run_id: str) -> None:
        # Late: lists of runs do not need it.
        from app.runs.lifecycle.recovery import recover_run, report_cost
        from app.runs.lifecycle.rejoin import rejoin_nodes

        while (run := self._services.runs.store.get(run_id)) is not None:
            helpers = [
                asyncio.create_task(work(self._services, run_id, run.attempt))
                for work in (report_cost, rejoin_nodes)
            ]
            try:
                for task in helpers:
                    task.add_done_callback(self._report)
                await RunWatch(self._services, run, self._events).run_until_end()
            finally:
                for task in helpers:
                    task.cancel()
            if not await recover_run(self._services, run_id):
                return

    async def end(self) -> None:
        """Cancel all tasks. Runs keep training."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        # Failures were already logged by `_report`.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch_active(self) -> None:
        for run_id in self._services.runs.store.in_states(ACTIVE_STATES):
            self.watch(run_id)
        # Lost while no process watched.
        for run_id in self._services.recoveries.pending():
            self.watch(run_id)

    async def _follow_storage(self) -> None:
        """Publish changes of the store by another process of this home, such as a new run.

        A store that is busy, read-only or on a full disk is tried again; one that is lost ends all
        tasks, since nothing that they store would be found again.
        """
        version: int | None = None
        checked_s = time.monotonic()
        while True:
            try:
                self._database.require_present()
                if time.monotonic() - checked_s > INTACT_POLL_S:
                    checked_s = time.monotonic()
                    await asyncio.to_thread(self._database.require_intact)
                self._services.runs.follow_events()
                newest = self._database.version_of_data()
                if version is not None and newest != version:
                    self._services.runs.publish_changed()
                    self._events.publish(ArtifactsChanged())
                    await self._take_nodes()
                version = newest
                self._services.runs.publish_starters()
                if self._tasks["nodes"].done():  # the store was busy when a node came online
                    self._spawn("nodes", self._follow_nodes())
                self._watch_active()
            except StoreLost as error:
                self._fail(error)
                return
            except UserError as error:
                self._warn(error)
            await asyncio.sleep(STORAGE_POLL_S)

    def _fail(self, error: StoreLost) -> None:
        """Report a lost store once, and end all tasks."""
        if self.failure is not None:
            return
        self.failure = error
        own = asyncio.current_task()
        for task in self._tasks.values():
            if task is not own:
                task.cancel()
        self._events.publish(StoreFailed(error.message, error.hint))

    def _report(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        errors = tuple(_flatten(task.exception()))
        lost = next((error for error in errors if isinstance(error, StoreLost)), None)
        expected = [error for error in errors if isinstance(error, UserError)]
        if lost is not None:
            self._fail(lost)
        elif len(expected) == len(errors):
            self._warn(expected[0])  # such as a full disk; its run is watched again soon
        else:
            _log.error("%s ended by a bug", task.get_name(), exc_info=task.exception())

    def _warn(self, error: UserError) -> None:
        """Log a problem unless it repeats the last one."""
        if error.message != self._said:
            self._said = error.message
            _log.warning("%s It is tried again.", describe_error(error))

    async def _take_nodes(self) -> None:
        """Register the nodes that another process has added or moved."""
        for record in self._nodes.all():
            node = node_from_json(record.name, record.address, record.identity)
            if record.name not in self._fleet.names():
                self._fleet.add(node)
            elif self._fleet.node(record.name) != node:
                await self._fleet.change(node)

    async def _follow_nodes(self) -> None:
        """Ask every node that comes online for its attempts."""
        online: set[str] = set()
        arrived: asyncio.Queue[str] = asyncio.Queue()

        def take(event: Event) -> None:
            if not isinstance(event, NodeChanged):
                return
            name = event.node.name
            if event.node.state != "online":
                online.discard(name)
            elif name not in online:
                online.add(name)
                arrived.put_nowait(name)

        # Listen first, so that a node that comes online while the snapshots are read is not missed.
        with self._events.listening(take):
            for snapshot in self._fleet.snapshots():
                take(NodeChanged(snapshot))
            while True:
                await search_nodes(self._services, (await arrived.get(),))
                self._watch_active()

    def _spawn(self, key: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=key)
        task.add_done_callback(self._report)
        self._tasks[key] = task
        return task


def _flatten(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, or all errors of a group."""
    # Only a group of errors has this attribute.
    inner = getattr(error, "exceptions", None)
    if inner is None and error is not None:
        yield error
    for one in inner or ():
        yield from _flatten(one)

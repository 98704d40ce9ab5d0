"""Composition root: opens the store and the fleet, and performs actions.

The button, the command and the test make the same request, such as `core.do(StartRun(spec=spec))`.
A core belongs to one event loop, and no action blocks that loop for longer than a local disk takes.
A run never depends on it: closing the core, or killing its process, changes nothing on any node.

It is used in two ways. A command opens it, does a few actions and leaves. The window does
`ConnectNodes` once; from then on the core keeps nodes connected, watches every active run, finds
runs that nodes remember, and notices what another process has stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from app.core.action import Action, Report, Result
from app.core.state import CoreState
from app.errors import UserError
from app.events import EventHub
from app.library.configs import ConfigLibrary
from app.nodes.fleet import Fleet
from app.nodes.node import node_from_json
from app.paths import Paths, private_folder
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.mandates import MasterKey
from app.runs.nodes.fleet_pool import FleetPool
from app.runs.run_repository import RunRepository
from app.runs.services import Services
from app.settings import Settings
from app.storage.artifacts import ArtifactStore
from app.storage.database import Database, open_database
from app.storage.hashes import HashStore
from app.storage.nodes import NodeStore
from app.storage.planning import PlanningStore
from app.storage.recoveries import RecoveryStore
from app.storage.runs import RunStore


class Core(CoreState):
    """State of the actions, and `do`, which performs them; create it with `Core.open`."""

    def __init__(
        self, services: Services, fleet: Fleet, nodes: NodeStore, database: Database, hub: EventHub
    ) -> None:
        background = BackgroundTasks(services, fleet, nodes, database, hub)
        super().__init__(services, fleet, nodes, background, database, hub)
        self.settings = services.settings
        self.notice = database.notice
        """Problem found when the store was opened, such as a damaged file moved aside."""
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        """Callbacks for the core's loop once it is closed and all nodes are disconnected."""

    async def do(self, action: Action[Result], report: Report | None = None) -> Result:
        """Perform an action and return its answer; `report` receives its events meanwhile.

        Raises:
            UserError: as the action says.
        """
        return await action.perform(self, report or (lambda event: None))

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, home: Path) -> AsyncIterator[Core]:
        """Open the store and the fleet below `home` without connecting to any node.

        Raises:
            UserError: the folder cannot be used, or a newer version wrote it.
        """
        paths = Paths(home)
        notice, database = await asyncio.to_thread(_open_home, paths)
        # Unwound in reverse: background tasks, fleet, `at_end`, and last the database that the
        # others write to.
        stack = contextlib.AsyncExitStack()
        stack.callback(database.close)
        at_end: list[Callable[[], Awaitable[None]]] = []
        stack.push_async_callback(_call_all, at_end)
        try:
            fleet = await stack.enter_async_context(Fleet(home, hub := EventHub()))
            core = _assemble(paths, database, fleet, hub)
            core.notice = " ".join(filter(None, (notice, database.notice)))
            core.at_end = at_end
            stack.push_async_callback(core.background.end)
            stack.push_async_callback(core.close_data)
            stack.enter_context(hub.listening(core.take_sample))
            stack.enter_context(hub.listening(core.take_facts))
            yield core
        finally:
            # Not `async with`: the fleet's task group would wrap an error of the block in a group.
            await stack.aclose()


async def _call_all(calls: list[Callable[[], Awaitable[None]]]) -> None:
    for call in calls:
        await call()


def _open_home(paths: Paths) -> tuple[str, Database]:
    """Return a notice about the home for the user (empty: none), and its database."""
    from app.private_home import make_private

    try:
        notice = make_private(paths)
    except OSError as error:
        raise UserError(
            f"{paths.home} cannot be used for Rackless's own files: {error}.",
            "Free space or repair its permissions, or set RACKLESS_HOME to another folder.",
        ) from error
    return notice, open_database(paths.database, functools.partial(_refill, paths))


def _refill(paths: Paths, database: Database) -> None:
    """Restore the nodes into a new store from their copy; nodes remember their own runs."""
    nodes = NodeStore(database, paths.nodes_file)
    nodes.restore_from_copy()
    if nodes.all():
        RunStore(database).set_search_nodes(True)


def _assemble(paths: Paths, database: Database, fleet: Fleet, hub: EventHub) -> Core:
    private_folder(paths.runs)  # journals and logs quote training data
    node_store = NodeStore(database, paths.nodes_file)
    for known in node_store.all():
        fleet.add(node_from_json(known.name, known.address, known.identity))
    recoveries = RecoveryStore(database)
    hashes, planning = HashStore(database), PlanningStore(database)
    services = Services(
        paths=paths,
        runs=RunRepository(paths, RunStore(database), recoveries, hub),
        hashes=hashes,
        pool=FleetPool(fleet, hashes, planning),
        settings=Settings(paths.settings_file),
        planning=planning,
        configs=ConfigLibrary(paths.configs),
        artifacts=ArtifactStore(database),
        recoveries=recoveries,
        key=MasterKey(paths.master_key),
    )
    return Core(services, fleet, node_store, database, hub)

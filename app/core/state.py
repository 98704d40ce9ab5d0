"""State that actions share while a core is open."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agents.contract.node import NodeFacts, Sample
from agents.contract.run import RankPlacement
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.events import Event, EventHub, NodeChanged, SampleArrived
from app.nodes.fleet import Fleet
from app.nodes.node import SshAddress, address_to_json, identity_to_json
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.services import LaunchForecast, Services
from app.storage.nodes import NodeStore
from app.storage.runs import RunRecord

if TYPE_CHECKING:
    from app.chats.chat import Chats
    from app.data.browser import DataBrowser
    from app.forecasts.planner import Planner
    from app.hub.hub_search import HubSearch
    from app.storage.database import Database
    from app.storage.prompts import PromptStore


class CoreState:
    """State that the `perform` of an action receives."""

    def __init__(
        self,
        services: Services,
        fleet: Fleet,
        nodes: NodeStore,
        background: BackgroundTasks,
        database: Database,
        events: EventHub,
    ) -> None:
        self.services = services
        self.fleet = fleet
        self.nodes = nodes
        self.background = background
        self.database = database
        self.events = events
        self.samples: dict[str, Sample] = {}
        """Newest sample of each node; plans read from it the GPU memory of other programs."""
        self.hosts_with_key: dict[str, SshAddress] = {}
        """Addresses with the key to use, by account, of hosts where a list installed a key."""
        services.hooks.forecast = self._forecast
        services.hooks.learn = self._learn

    @functools.cached_property
    def planner(self) -> Planner:
        """Planner of runs."""
        # Imported on use: it takes a tenth of a second, which lists of runs do not need.
        from app.forecasts.planner import Planner

        return Planner(self.services)

    @functools.cached_property
    def hub_search(self) -> HubSearch:
        """Searches of the hub."""
        from app.hub.hub_search import HubSearch  # on use: most commands never search

        return HubSearch()

    @functools.cached_property
    def chats(self) -> Chats:
        """Open conversations."""
        from app.chats.chat import Chats  # on use: most commands never chat

        return Chats(self.services)

    @functools.cached_property
    def data(self) -> DataBrowser:
        """Rows of the data that is looked through."""
        from app.data.browser import DataBrowser  # as above

        return DataBrowser(self.services.paths.home)

    @functools.cached_property
    def prompts(self) -> PromptStore:
        """Test prompts of projects, and the answers that were compared."""
        from app.storage.prompts import PromptStore  # as above

        return PromptStore(self.database)

    async def close_data(self) -> None:
        """End the process that reads data, if there is one."""
        if (data := self.__dict__.get("data")) is not None:
            await data.close()

    def full_id(self, run_id: str) -> str:
        """Return the full id of a run from its first characters.

        Raises:
            UserError: there is no such run, or there are several.
        """
        return self.services.runs.get(run_id).run_id

    def watch(self, run_id: str) -> None:
        """Watch a launched run if the core stays open; a command exits after the start."""
        if self.background.is_on:
            self.background.watch(run_id)

    def save_node(self, name: str) -> None:
        """Store a node's address and identity."""
        node = self.fleet.node(name)
        self.nodes.save(name, address_to_json(node.address), identity_to_json(node))

    def take_sample(self, event: Event) -> None:
        """Keep a node's newest sample."""
        # Replayed samples are up to ten minutes old; what others hold on a GPU has changed since.
        if isinstance(event, SampleArrived) and not event.replayed:
            self.samples[event.node] = event.sample

    def take_facts(self, event: Event) -> None:
        """Store a node's identity once it is known; earlier versions stored none."""
        if not isinstance(event, NodeChanged) or event.node.facts is None:
            return
        name = event.node.name
        if not self.fleet.learn(name, event.node.facts):
            return
        with contextlib.suppress(UserError):  # the disk is full: it is stored next time
            # Another process may have removed it.
            if any(record.name == name for record in self.nodes.all()):
                self.save_node(name)

    async def _forecast(
        self, spec: RunSpec, facts: Mapping[str, NodeFacts], ranks: Sequence[RankPlacement]
    ) -> LaunchForecast:
        return await self.planner.forecast(spec, facts, ranks, self.samples)

    def _learn(self, run: RunRecord) -> None:
        from app.forecasts.learning import learn_from_run

        learn_from_run(self.services, run)

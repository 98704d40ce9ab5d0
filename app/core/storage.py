"""Actions on the disks of nodes: see what lies there, and delete what may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.events import ArtifactsChanged, EventHub
from app.nodes.fleet import Fleet
from app.runs.services import Services

if TYPE_CHECKING:
    from app.artifacts.node_storage import FreedStorage
    from app.artifacts.storage_rules import NodeStorage
    from app.core.api import OnMessage


class CoreStorage:
    """`core.storage`."""

    def __init__(self, services: Services, fleet: Fleet, events: EventHub) -> None:
        self._services = services
        self._fleet = fleet
        self._events = events

    async def look(self, node: str) -> NodeStorage:
        """Return what lies on a node below the agent's home, with the reasons to keep it.

        Raises:
            UserError: the node does not answer.
        """
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.artifacts.node_storage import list_storage

        return await list_storage(self._services, self._fleet.client(node))

    async def free(
        self, node: str, names: Sequence[str], progress: OnMessage | None = None
    ) -> FreedStorage:
        """Delete items of a node by name; those that may not be deleted by now stay.

        Raises:
            UserError: the node does not answer.
        """
        from app.artifacts.node_storage import free_storage

        tell = progress or (lambda text: None)
        done = await free_storage(self._services, self._fleet.client(node), names, tell)
        self._events.publish(ArtifactsChanged())
        return done

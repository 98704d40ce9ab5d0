"""Actions on the disks of nodes: list Rackless's items, and delete those that nothing needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action, as_progress
from app.events import ArtifactsChanged

if TYPE_CHECKING:
    from app.artifacts.node_storage import FreedStorage
    from app.artifacts.storage_rules import NodeStorage
    from app.core.state import CoreState


@action("storage.look")
class ReadStorage(Action["NodeStorage"]):
    """Return the items below the agent's home on a node, with the reasons to keep them.

    Raises:
        UserError: the node does not answer.
    """

    node: str

    async def perform(self, core: CoreState, report: Report) -> NodeStorage:
        # Imported on use, here and below: other actions start sooner.
        from app.artifacts.node_storage import list_storage

        return await list_storage(core.services, core.fleet.client(self.node))


@action("storage.free")
class FreeStorage(Action["FreedStorage"]):
    """Delete items of a node by name; items that have become protected stay.

    Raises:
        UserError: the node does not answer.
    """

    node: str
    names: Sequence[str]

    async def perform(self, core: CoreState, report: Report) -> FreedStorage:
        from app.artifacts.node_storage import free_storage

        done = await free_storage(
            core.services, core.fleet.client(self.node), self.names, as_progress(report)
        )
        core.events.publish(ArtifactsChanged())
        return done

"""Actions on what a check has found: show a repair, apply it, check again, and undo it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.nodes.fleet import Fleet
from app.runs.services import Services

if TYPE_CHECKING:
    from agents.contract.repair import Change, ChangeList, RepairPreview
    from app.core.api import OnMessage
    from app.provisioning.check_row import CheckRow
    from app.provisioning.repairs import Repair


class CoreRepairs:
    """`core.repairs`."""

    def __init__(self, services: Services, fleet: Fleet) -> None:
        self._services = services
        self._fleet = fleet

    async def preview(self, node: str, repair: Repair) -> RepairPreview:
        """Return what a repair would do on a node now, and how an administrator's rights are had
        there; changes nothing.

        Raises:
            UserError: there is no such node, or it does not answer.
        """
        # Imported on use, here and below: lists of runs need none of it, and start sooner.
        from agents.contract.requests.repairs import PreviewRepair

        return await self._fleet.client(node).ask(PreviewRepair(steps=tuple(repair.steps)))

    async def apply(
        self,
        node: str,
        repair: Repair,
        shown: RepairPreview,
        password: str = "",
        progress: OnMessage | None = None,
    ) -> Change:
        """Apply a repair to a node as it was shown, and return its record from the node's log.

        The record has a problem if a step failed; what was done before can be undone. The password
        goes to the node's sudo and is kept nowhere.

        Raises:
            AdminRefused: sudo did not take the password, or may not be used; nothing was changed.
            UserError: it cannot be applied; nothing was changed.
        """
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.provisioning.changes import apply_repair

        master = self._services.identity
        return await apply_repair(
            self._fleet.client(node),
            repair,
            shown,
            by=f"{master.user}@{master.host}",
            password=password,
            progress=progress,
        )

    async def retest(self, row: CheckRow, names: Sequence[str] = ()) -> tuple[CheckRow, ...]:
        """Check again what a row was about; `names`: nodes that were checked then, empty: all.

        Raises:
            UserError: there is no such node.
        """
        from app.provisioning.retest import retest

        return await retest(self._fleet, row, names or self._fleet.names())

    async def changes(self, node: str) -> ChangeList:
        """Return what repairs have changed on a node, from its own log, the oldest first.

        Raises:
            UserError: there is no such node, or it does not answer.
        """
        from agents.contract.requests.repairs import ListChanges

        return await self._fleet.client(node).ask(ListChanges())

    async def undo(
        self,
        node: str,
        numbers: Sequence[int] = (),
        password: str = "",
        progress: OnMessage | None = None,
    ) -> tuple[Change, ...]:
        """Take changes of a node back, the newest first; no numbers: all that are in force.

        Raises:
            AdminRefused: sudo did not take the password, or may not be used; nothing was changed.
            UserError: there is no such change, or it cannot be done; nothing was changed.
        """
        from app.provisioning.changes import undo_changes

        return await undo_changes(
            self._fleet.client(node), numbers, password=password, progress=progress
        )

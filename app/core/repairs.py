"""Actions on the findings of a check: preview a repair, apply it, check again, and undo it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action, as_progress

if TYPE_CHECKING:
    from agents.contract.repair import Change, ChangeList, RepairPreview
    from app.core.state import CoreState
    from app.provisioning.check_row import CheckRow
    from app.provisioning.repairs import Repair


@action("repairs.preview")
class ShowRepair(Action["RepairPreview"]):
    """Preview a repair on a node, and the way to administrator rights there; changes nothing.

    Raises:
        UserError: there is no such node, or it does not answer.
    """

    node: str
    repair: Repair

    async def perform(self, core: CoreState, report: Report) -> RepairPreview:
        from agents.contract.requests.repairs import PreviewRepair

        preview = PreviewRepair(steps=tuple(self.repair.steps))
        return await core.fleet.client(self.node).ask(preview)


@action("repairs.apply")
class ApplyRepair(Action["Change"]):
    """Apply a previewed repair to a node, and return its record from the node's log.

    If a step failed, the record has a problem, and the steps before it can be undone. The
    password goes to the node's sudo and is not stored.

    Raises:
        AdminRefused: sudo refused the password or the user; nothing was changed.
        UserError: it cannot be applied; nothing was changed.
    """

    node: str
    repair: Repair
    shown: RepairPreview
    password: str = field(default="", repr=False)

    async def perform(self, core: CoreState, report: Report) -> Change:
        # Imported on use, here and below: other actions start sooner.
        from app.provisioning.changes import apply_repair

        master = core.services.identity
        return await apply_repair(
            core.fleet.client(self.node),
            self.repair,
            self.shown,
            by=f"{master.user}@{master.host}",
            password=self.password,
            progress=as_progress(report),
        )


@action("repairs.retest")
class RetestRow(Action["tuple[CheckRow, ...]"]):
    """Repeat the check of a row.

    Raises:
        UserError: there is no such node.
    """

    row: CheckRow
    names: Sequence[str] = ()
    """Nodes of the original check; empty: all."""

    async def perform(self, core: CoreState, report: Report) -> tuple[CheckRow, ...]:
        from app.provisioning.retest import retest

        return await retest(core.fleet, self.row, self.names or core.fleet.names())


@action("repairs.changes")
class ReadChanges(Action["ChangeList"]):
    """Return the changes that repairs made on a node, from its own log, the oldest first.

    Raises:
        UserError: there is no such node, or it does not answer.
    """

    node: str

    async def perform(self, core: CoreState, report: Report) -> ChangeList:
        from agents.contract.requests.repairs import ListChanges

        return await core.fleet.client(self.node).ask(ListChanges())


@action("repairs.undo")
class UndoChanges(Action["tuple[Change, ...]"]):
    """Undo changes of a node, the newest first.

    Raises:
        AdminRefused: sudo refused the password or the user; nothing was changed.
        UserError: there is no such change, or it cannot be done; nothing was changed.
    """

    node: str
    numbers: Sequence[int] = ()
    """Numbers of changes; empty: all that are in force."""
    password: str = field(default="", repr=False)

    async def perform(self, core: CoreState, report: Report) -> tuple[Change, ...]:
        from app.provisioning.changes import undo_changes

        return await undo_changes(
            core.fleet.client(self.node),
            self.numbers,
            password=self.password,
            progress=as_progress(report),
        )

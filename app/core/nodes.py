"""Actions on nodes: check, measure, wake and prepare them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action, as_progress
from app.errors import RacklessError
from app.events import LinkSnapshot

if TYPE_CHECKING:
    from agents.contract.environments import KeptItem
    from agents.contract.node import Calibration, EnvironmentReport, LogTail
    from app.core.state import CoreState
    from app.events import NodeSnapshot
    from app.nodes.node import NodeAddress
    from app.provisioning.check_row import CheckRow
    from app.provisioning.windows.offer import ScriptOptions, WindowsScript

FOLLOW_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowChecked:
    """Event: a check has finished a row about a node."""

    row: CheckRow


@action("nodes.wsl_distros")
class ListDistros(Action["tuple[str, ...]"]):
    """Return the names of this PC's WSL distros; empty without WSL."""

    async def perform(self, core: CoreState, report: Report) -> tuple[str, ...]:
        # Imported on use, here and below: other actions start sooner.
        from app.nodes.transport.local import list_distros

        return await list_distros()


@action("nodes.address")
class GetAddress(Action["NodeAddress"]):
    """Return the address at which a node is reached.

    Raises:
        UserError: there is no such node.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> NodeAddress:
        return core.fleet.node(self.name).address


@action("nodes.wake")
class WakeNode(Action["NodeSnapshot"]):
    """Wake a node over its network and return it once it answers; takes up to three minutes.

    Raises:
        UserError: its hardware address is not known, or it does not answer.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> NodeSnapshot:
        from app.nodes.wake import share_network, wake_node

        node = core.fleet.node(self.name)
        others = [one for one in core.fleet.snapshots() if one.name != self.name]
        # A command has not contacted the nodes yet, so any of them may turn out to be online.
        helpers = [
            core.fleet.client(one.name)
            for one in others
            if one.state == "online" or not core.background.is_on
            if node.wake and share_network(node.wake, core.fleet.node(one.name).wake)
        ]

        async def answers() -> bool:
            (found,) = await core.fleet.reach((self.name,))
            return found.state == "online"

        await wake_node(node, helpers, answers, as_progress(report))
        return core.fleet.snapshot(self.name)


@action("nodes.all")
class ListNodes(Action["tuple[NodeSnapshot, ...]"]):
    """Return every node as last known, without asking it."""

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeSnapshot, ...]:
        return core.fleet.snapshots()


@action("nodes.refresh")
class RefreshNode(Action["NodeSnapshot"]):
    """Return the node after asking it for its current facts.

    Raises:
        UserError: the node does not answer.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> NodeSnapshot:
        return await core.fleet.refresh(self.name)


@action("nodes.reach")
class ReachNodes(Action["tuple[NodeSnapshot, ...]"]):
    """Try to reach every node and return their states; an unreachable node is no error."""

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeSnapshot, ...]:
        return await core.fleet.reach()


@action("nodes.logs")
class ReadNodeLogs(Action["tuple[LogTail, ...]"]):
    """Return the tails of the rank and supervisor logs on a node, the newest log first.

    Raises:
        UserError: the node does not answer.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> tuple[LogTail, ...]:
        from agents.contract.requests.node import ReadLogs

        return (await core.fleet.client(self.name).ask(ReadLogs())).tails


@action("nodes.remove")
class RemoveNode(Action[None]):
    """Remove a node from the list. Nothing is deleted on it.

    Raises:
        UserError: there is no such node, or an active run needs it.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> None:
        from app.runs.lifecycle.stop import require_unused

        # Raises for an unknown name before anything is changed.
        core.fleet.node(self.name)
        require_unused(core.services, self.name)
        await core.fleet.remove(self.name)
        core.nodes.remove(self.name)
        core.services.planning.forget_node(self.name)
        core.services.settings.forget_node(self.name)


@action("nodes.connect")
class ConnectNodes(Action[None]):
    """Keep nodes (empty: all) connected from now on, and start the background tasks."""

    names: tuple[str, ...] = ()

    async def perform(self, core: CoreState, report: Report) -> None:
        await core.fleet.connect(self.names)
        core.background.begin()
        core.background.run_beside("addresses", _follow_addresses(core))


@action("nodes.setup")
class SetUpNode(Action["EnvironmentReport"]):
    """Build the training environment on a node from the lock file, or adopt `python`.

    Raises:
        UnshippedLock: the build of torch has no lock yet; ask the user, then call again.
        UserError: it cannot be built there, `python` does not fit, or the node shares the agent's
            folder with another one.
    """

    name: str
    python: str | None = None
    accept_index: bool = False
    """True if the user accepts the hashes that PyTorch's index names."""

    async def perform(self, core: CoreState, report: Report) -> EnvironmentReport:
        from agents.contract.requests.node import ReadFacts
        from app.nodes.shared_homes import require_own_homes
        from app.provisioning.environment import setup_environment
        from app.provisioning.wheels import WheelPlaces

        known = {n.name: n.facts for n in core.fleet.snapshots() if n.facts is not None}
        known[self.name] = await core.fleet.client(self.name).ask(ReadFacts())
        # Else one node would replace the environment of another.
        await require_own_homes({name: core.fleet.client(name) for name in known}, known)
        places = WheelPlaces(
            store=core.services.paths.wheels,
            locks=core.services.paths.environments,
            peers=tuple(core.fleet.client(one) for one in core.fleet.names() if one != self.name),
        )
        try:
            return await setup_environment(
                core.fleet.client(self.name),
                places,
                self.python,
                as_progress(report),
                others=[facts for name, facts in known.items() if name != self.name],
                accept_index=self.accept_index,
            )
        finally:
            # Also after a failed trial: there is another environment then.
            with contextlib.suppress(RacklessError):
                await core.fleet.refresh(self.name)


@action("nodes.kept")
class ListLeftovers(Action["tuple[KeptItem, ...]"]):
    """Return the leftovers of environment builds on a node, the largest first.

    Raises:
        UserError: the node does not answer.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> tuple[KeptItem, ...]:
        from agents.contract.requests.environment import ListKept

        return (await core.fleet.client(self.name).ask(ListKept())).items


@action("nodes.prune")
class PruneNode(Action[int]):
    """Delete kept items of a node by name; return the number of bytes freed.

    Raises:
        UserError: an item is in use by now, or the node does not answer.
    """

    name: str
    items: Sequence[str]

    async def perform(self, core: CoreState, report: Report) -> int:
        from agents.contract.requests.environment import PruneKept

        prune = PruneKept(names=tuple(self.items))
        return (await core.fleet.client(self.name).ask(prune)).freed_bytes


@action("nodes.check")
class CheckNodes(Action["tuple[CheckRow, ...]"]):
    """Check nodes (empty: all) before a run; return one row per check.

    `RowChecked` is reported for each row as soon as it is known. Measured links between nodes are
    saved for plans.

    Raises:
        UserError: there is no node of that name.
    """

    names: tuple[str, ...] = ()

    async def perform(self, core: CoreState, report: Report) -> tuple[CheckRow, ...]:
        from app.forecasts.learning import store_links
        from app.provisioning.check import check_nodes
        from app.provisioning.last_check import store_last_check

        rows = await check_nodes(
            core.fleet,
            self.names or core.fleet.names(),
            on_row=lambda row: report(RowChecked(row)),
            progress=as_progress(report),
        )
        store_links(core.services.planning, rows)
        store_last_check(core.services.paths.last_check, rows)
        return rows


@action("nodes.windows_script")
class MakeWindowsScript(Action["WindowsScript"]):
    """Return the script that prepares Windows for a node in WSL, added already or not yet.

    Raises:
        UserError: the name or an option cannot be used.
    """

    name: str
    options: ScriptOptions | None = None

    async def perform(self, core: CoreState, report: Report) -> WindowsScript:
        from app.provisioning.windows.offer import ScriptOptions, offer_script

        nodes = {one: core.fleet.node(one) for one in core.fleet.names()}
        return await asyncio.to_thread(
            offer_script, nodes, self.name, self.options or ScriptOptions()
        )


@action("nodes.save_windows_script")
class SaveWindowsScript(Action["Path"]):
    """Write a script for Windows to a file and return its absolute path.

    Raises:
        UserError: it cannot be written.
    """

    script: WindowsScript
    file: Path

    async def perform(self, core: CoreState, report: Report) -> Path:
        from app.provisioning.windows.offer import save_script

        return await asyncio.to_thread(save_script, self.script, self.file)


@action("nodes.links")
class ListLinks(Action["tuple[LinkSnapshot, ...]"]):
    """Return the links measured by the last checks, one for each direction."""

    async def perform(self, core: CoreState, report: Report) -> tuple[LinkSnapshot, ...]:
        return tuple(
            LinkSnapshot(
                node=link.node,
                peer=link.peer,
                round_trip_s=link.round_trip_s,
                bytes_per_s=link.bytes_per_s,
                measured_s=link.measured_s,
            )
            for link in core.services.planning.links()
        )


@action("nodes.calibrate")
class CalibrateNode(Action["tuple[Calibration, ...]"]):
    """Measure the GPUs of a node (else its CPU), 20 seconds each; plans use it from then on.

    Raises:
        UserError: it has no training environment, a run uses a GPU, or a measurement is not
            plausible, as on a busy PC; that one is not saved, those of other GPUs are.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> tuple[Calibration, ...]:
        from agents.contract.requests.node import ReadFacts
        from app.provisioning.calibrate import calibrate_node, refuse_faulty

        client = core.fleet.client(self.name)
        found = await calibrate_node(client, as_progress(report))
        facts = await client.ask(ReadFacts())
        faults = refuse_faulty(self.name, found, facts.num_cores)
        for device_id, calibration in found.items():
            if device_id not in faults:
                core.services.planning.save_calibration(self.name, device_id, calibration)
        # Raised only now: the measurements of the other GPUs are saved.
        for error in faults.values():
            raise error
        return tuple(found.values())


@action("nodes.calibrations")
class ListCalibrations(Action["dict[str, Calibration]"]):
    """Return the calibrations of a node's GPUs by their UUIDs."""

    name: str

    async def perform(self, core: CoreState, report: Report) -> dict[str, Calibration]:
        known = core.services.planning.calibrations()
        return {device_id: found for (node, device_id), found in known.items() if node == self.name}


async def _follow_addresses(core: CoreState) -> None:
    """Search for silent nodes at other addresses, with growing pauses, if the setting allows it."""
    from app.core.new_nodes import FindNode
    from app.nodes.identity import SilentNodes

    silent = SilentNodes()
    while True:
        await asyncio.sleep(FOLLOW_INTERVAL_S)
        wanted = bool(core.services.settings.get("follow_addresses"))
        for name in silent.due(core.fleet.snapshots(), time.monotonic()) if wanted else ():
            with contextlib.suppress(RacklessError):  # it is off, or in another network
                node = await FindNode(name=name).perform(core, lambda event: None)
                _log.info("%s is at %s now", name, node.address)

"""Actions on nodes: add, check, measure and watch them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.environments import KeptItem
from agents.contract.node import Calibration, EnvironmentReport, LogTail
from agents.contract.requests.environment import ListKept, PruneKept
from agents.contract.requests.node import ReadFacts, ReadLogs
from app.errors import (
    RacklessError,
    UserError,
)
from app.events import Event, EventHub, LinkSnapshot, NodeChanged, NodeSnapshot, SampleArrived
from app.nodes.fleet import Fleet
from app.nodes.node import (
    Node,
    NodeAddress,
    SshAddress,
    address_to_json,
    identity_to_json,
    parse_ssh_target,
)
from app.runs.lifecycle import reconcile, stop
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.services import Services
from app.storage.nodes import NodeStore

if TYPE_CHECKING:
    from app.core.api import OnMessage
    from app.flows.node_list import NodeLine, NodeOutcome
    from app.nodes.discovery.candidate import Candidate
    from app.nodes.key_copy import CopiedKey
    from app.nodes.ssh_hosts import SshHost
    from app.provisioning.check_row import CheckRow, OnRow
    from app.provisioning.windows.offer import ScriptOptions, WindowsScript


FOLLOW_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)


class CoreNodes:
    """`core.nodes`."""

    def __init__(
        self,
        services: Services,
        fleet: Fleet,
        store: NodeStore,
        upkeep: BackgroundTasks,
        events: EventHub,
    ) -> None:
        self._services = services
        self._fleet = fleet
        self._store = store
        self._background = upkeep
        self._events = events
        self._hosts_with_key: dict[str, SshAddress] = {}
        """Hosts that our key was copied to for a list, by account: with the key that they need."""

    async def wsl_distros(self) -> tuple[str, ...]:
        """Return the names of the WSL distros of this PC; none where there is no WSL."""
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.nodes.transport.local import list_distros

        return await list_distros()

    async def resolve(
        self, target: str, key: Path | None = None, agreed: tuple[str, ...] = ()
    ) -> SshHost:
        """Return the address that `ssh TARGET` would log in to, by ~/.ssh/config.

        Args:
            target: `[USER@]HOST[:PORT]`, where the host may be a name of ~/.ssh/config.
            key: private key file to use instead of those that it names.
            agreed: commands of ~/.ssh/config that a person has agreed to run.

        Raises:
            RunsPrograms: it names another command; ask, then call again with it.
            UserError: target or configuration is written wrongly.
        """
        from app.nodes.ssh_hosts import config_files, resolve_host

        files, wanted = config_files(Path.home()), parse_ssh_target(target)
        # On a thread: the programs of `Match exec` may take seconds.
        return await asyncio.to_thread(resolve_host, wanted, files, key=key, agreed=agreed)

    async def discover(self) -> tuple[Candidate, ...]:
        """Return PCs of ~/.ssh/config and of this network that could become nodes.

        Nothing but a TCP connection to their SSH ports is made.

        Raises:
            UserError: ~/.ssh/config cannot be read.
        """
        from app.nodes.discovery.discover import discover

        return await discover([self._fleet.node(name) for name in self._fleet.names()])

    async def add_list(
        self,
        lines: tuple[NodeLine, ...],
        accepted: Mapping[str, str] | None = None,
        key: Path | None = None,
        run_programs: bool = False,
        passwords: Mapping[str, str] | None = None,
    ) -> tuple[NodeOutcome, ...]:
        """Add many PCs at once; return what became of each line, in their order.

        Args:
            lines: what was typed.
            accepted: fingerprint that the user has confirmed, by host as an outcome names it.
            key: private key file for all of them, instead of those of ~/.ssh/config.
            run_programs: whether the programs that ~/.ssh/config names may run.
            passwords: by account, as an outcome names it: with each, our key is copied there as
                `copy_key` does. Each is tried once.
        """
        from app.core.listed_nodes import ListedNodes

        listed = ListedNodes(
            self,
            accepted or {},
            passwords or {},
            self._hosts_with_key,
            key=key,
            run_programs=run_programs,
        )
        return tuple(await asyncio.gather(*map(listed.add, lines)))

    async def add(
        self, name: str, address: NodeAddress, accept_host_key: str | None = None
    ) -> NodeSnapshot:
        """Connect to a node, start the agent there, and save the node.

        Raises:
            HostKeyUnknown: first connection; ask the user, then call again with its fingerprint.
            UserError: it cannot be added; nothing is saved.
        """
        await self._fleet.join(Node(name=name, address=address), accept_host_key)
        self._save(name)
        # On since `connect`, as in the window: every node stays connected, also a new one.
        if self._background.is_on:
            await self._fleet.connect((name,))
        # The PC may have carried runs of an earlier store, or of this one before it was removed.
        await reconcile.search_nodes(self._services, (name,))
        return await self._fleet.refresh(name)

    async def copy_key(
        self, address: SshAddress, password: str, accept_host_key: str | None = None
    ) -> CopiedKey:
        """Let an account that refuses our keys accept one, which LoginRefused has named.

        The password is used for this and kept nowhere.

        Raises:
            HostKeyUnknown: first connection; ask the user, then call again with its fingerprint.
            LoginRefused: the password is wrong, or the key is refused still.
            UserError: the key cannot be added there.
        """
        from app.nodes.key_copy import copy_key

        home = self._services.paths.home
        return await copy_key(address, password, home=home, accept_host_key=accept_host_key)

    async def take_back_key(self, name: str) -> bool:
        """Remove the line that `copy_key` added for a node; return whether it was still there.

        Raises:
            UserError: no line was added there, or the node cannot be reached.
        """
        from app.nodes.key_copy import take_back_key

        address = self._fleet.node(name).address
        if not isinstance(address, SshAddress):
            raise UserError(f"{name} is {address} and needs no key", where=name)
        return await take_back_key(address, home=self._services.paths.home)

    def address(self, name: str) -> NodeAddress:
        """Return the address at which a node is reached.

        Raises:
            UserError: there is no such node.
        """
        return self._fleet.node(name).address

    async def set_address(
        self, name: str, address: NodeAddress, accept_host_key: str | None = None
    ) -> NodeSnapshot:
        """Reach a node at a new address from now on, if it is the same PC.

        Raises:
            HostKeyUnknown: its host key is another one; ask, then call again with its fingerprint.
            UserError: it cannot be reached there, or is another PC; the old address stays.
        """
        await self._fleet.move(name, address, accept_host_key)
        self._save(name)
        if self._background.is_on:
            await self._fleet.connect((name,))
        return self._fleet.snapshot(name)

    async def find(self, name: str) -> NodeSnapshot:
        """Look for a node at another address of this network, and reach it there from now on.

        Raises:
            UserError: no PC of this network has its host key and machine id.
        """
        from app.nodes.finder import find_host

        address = self._fleet.node(name).address
        if not isinstance(address, SshAddress):
            raise UserError(f"{name} is {address} and has no address", where=name)
        places = await find_host(address, self._services.paths.home)
        refused = ""
        for place in places:
            try:
                return await self.set_address(name, place)
            except UserError as error:  # a cloned disk has the same host key
                refused = f" {error.message}"
        raise UserError(
            f"no PC of this network answers as {name} at another address than {address.host}."
            f"{refused}",
            "Check that it is on. If it is in another network: rackless nodes set-address "
            f"{name} --ssh USER@HOST",
            where=name,
        )

    async def _follow_addresses(self) -> None:
        """Look for silent nodes at other addresses, less and less often, where that is wanted."""
        from app.nodes.identity import SilentNodes

        silent = SilentNodes()
        while True:
            await asyncio.sleep(FOLLOW_INTERVAL_S)
            wanted = bool(self._services.settings.get("follow_addresses"))
            for name in silent.due(self._fleet.snapshots(), time.monotonic()) if wanted else ():
                with contextlib.suppress(RacklessError):  # it is off, or in another network
                    node = await self.find(name)
                    _log.info("%s is at %s now", name, node.address)

    def take_facts(self, event: Event) -> None:
        """Store the identity of a node once it is known, such as of one of an earlier version."""
        if not isinstance(event, NodeChanged) or event.node.facts is None:
            return
        name = event.node.name
        if not self._fleet.learn(name, event.node.facts):
            return
        with contextlib.suppress(UserError):  # the disk is full: it is stored next time
            # Another process may have removed it.
            if any(record.name == name for record in self._store.all()):
                self._save(name)

    def _save(self, name: str) -> None:
        node = self._fleet.node(name)
        self._store.save(name, address_to_json(node.address), identity_to_json(node))

    async def wake(self, name: str, progress: OnMessage | None = None) -> NodeSnapshot:
        """Wake a node over its network and return it once it answers; takes up to three minutes.

        Raises:
            UserError: its hardware address is not known, or it does not answer.
        """
        from app.nodes.wake import share_network, wake_node

        node = self._fleet.node(name)
        others = [one for one in self._fleet.snapshots() if one.name != name]
        helpers = [
            self._fleet.client(one.name)
            for one in others
            if one.state == "online" or not self._background.is_on
            if node.wake and share_network(node.wake, self._fleet.node(one.name).wake)
        ]

        async def answers() -> bool:
            (found,) = await self._fleet.reach((name,))
            return found.state == "online"

        await wake_node(node, helpers, answers, progress or (lambda text: None))
        return self._fleet.snapshot(name)

    def all(self) -> tuple[NodeSnapshot, ...]:
        """Return every node as last known, without asking it."""
        return self._fleet.snapshots()

    async def refresh(self, name: str) -> NodeSnapshot:
        """Return the node after asking it for its current facts.

        Raises:
            UserError: the node does not answer.
        """
        return await self._fleet.refresh(name)

    async def reach(self) -> tuple[NodeSnapshot, ...]:
        """Try to reach every node and return their states; an unreachable node is no error."""
        return await self._fleet.reach()

    async def logs(self, name: str) -> tuple[LogTail, ...]:
        """Return the tails of the rank and supervisor logs on a node, the newest log first.

        Raises:
            UserError: the node does not answer.
        """
        return (await self._fleet.client(name).ask(ReadLogs())).tails

    async def remove(self, name: str) -> None:
        """Remove a node from the list. Nothing is deleted on it.

        Raises:
            UserError: there is no such node, or an active run needs it.
        """
        # Raises for an unknown name before anything is changed.
        self._fleet.node(name)
        stop.require_unused(self._services, name)
        await self._fleet.remove(name)
        self._store.remove(name)
        self._services.planning.forget_node(name)
        self._services.settings.forget_node(name)

    async def connect(self, names: tuple[str, ...] = ()) -> None:
        """Keep nodes (empty: all) connected from now on, and start the background tasks."""
        await self._fleet.connect(names)
        self._background.begin()
        self._background.run_beside("addresses", self._follow_addresses())

    async def setup(
        self,
        name: str,
        python: str | None = None,
        progress: OnMessage | None = None,
        *,
        accept_index: bool = False,
    ) -> EnvironmentReport:
        """Build the training environment on a node from the lock file, or adopt `python`.

        `accept_index`: whether the user agrees to hashes that PyTorch's index names.

        Raises:
            UnshippedLock: the build of torch has no lock yet; ask the user, then call again.
            UserError: it cannot be built there, or `python` does not fit.
        """
        from app.provisioning.environment import setup_environment
        from app.provisioning.wheels import WheelPlaces

        places = WheelPlaces(
            store=self._services.paths.wheels,
            locks=self._services.paths.environments,
            peers=tuple(self._fleet.client(one) for one in self._fleet.names() if one != name),
        )
        try:
            return await setup_environment(
                self._fleet.client(name),
                places,
                python,
                progress,
                others=[n.facts for n in self.all() if n.name != name and n.facts is not None],
                accept_index=accept_index,
            )
        finally:
            # Also after a failed trial: there is another environment then.
            with contextlib.suppress(RacklessError):
                await self._fleet.refresh(name)

    async def kept(self, name: str) -> tuple[KeptItem, ...]:
        """Return what building environments has left on a node, the largest first.

        Raises:
            UserError: the node does not answer.
        """
        return (await self._fleet.client(name).ask(ListKept())).items

    async def prune(self, name: str, items: Sequence[str]) -> int:
        """Delete kept items of a node by name; return the bytes that this frees.

        Raises:
            UserError: one is needed by now, or the node does not answer.
        """
        return (await self._fleet.client(name).ask(PruneKept(names=tuple(items)))).freed_bytes

    async def check(
        self,
        names: tuple[str, ...] = (),
        on_row: OnRow | None = None,
        progress: OnMessage | None = None,
    ) -> tuple[CheckRow, ...]:
        """Check nodes (empty: all) before a run; return one row per check.

        Measured links between nodes are saved for plans.

        Args:
            names: of the nodes.
            on_row: called with each row as soon as it is known.
            progress: called with a sentence about what is being checked.

        Raises:
            UserError: there is no node of that name.
        """
        from app.forecasts.learning import store_links
        from app.provisioning.check import check_nodes
        from app.provisioning.last_check import store_last_check

        rows = await check_nodes(
            self._fleet, names or self._fleet.names(), on_row=on_row, progress=progress
        )
        store_links(self._services.planning, rows)
        store_last_check(self._services.paths.last_check, rows)
        return rows

    async def windows_script(
        self, name: str, options: ScriptOptions | None = None
    ) -> WindowsScript:
        """Return the script that prepares the Windows of a node in WSL, known already or not yet.

        Raises:
            UserError: the name or an option cannot be used.
        """
        from app.provisioning.windows.offer import ScriptOptions, offer_script

        nodes = {one: self._fleet.node(one) for one in self._fleet.names()}
        return await asyncio.to_thread(offer_script, nodes, name, options or ScriptOptions())

    async def save_windows_script(self, script: WindowsScript, file: Path) -> Path:
        """Write a script for Windows to a file and return its absolute path.

        Raises:
            UserError: it cannot be written.
        """
        from app.provisioning.windows.offer import save_script

        return await asyncio.to_thread(save_script, script, file)

    def links(self) -> tuple[LinkSnapshot, ...]:
        """Return the links that the last checks measured, each direction by itself."""
        return tuple(
            LinkSnapshot(
                node=link.node,
                peer=link.peer,
                round_trip_s=link.round_trip_s,
                bytes_per_s=link.bytes_per_s,
                measured_s=link.measured_s,
            )
            for link in self._services.planning.links()
        )

    async def calibrate(
        self, name: str, progress: OnMessage | None = None
    ) -> tuple[Calibration, ...]:
        """Measure the GPUs of a node (else its CPU), 20 seconds each; plans use it from then on.

        Raises:
            UserError: it has no training environment, a run uses a GPU, or a measurement cannot be
                believed, as on a busy PC; it is not saved, but those of other GPUs are.
        """
        from app.provisioning.calibrate import calibrate_node, refuse_faulty

        client = self._fleet.client(name)
        found = await calibrate_node(client, progress)
        facts = await client.ask(ReadFacts())
        faults = refuse_faulty(name, found, facts.num_cores)
        for device_id, calibration in found.items():
            if device_id not in faults:
                self._services.planning.save_calibration(name, device_id, calibration)
        for error in faults.values():
            raise error
        return tuple(found.values())

    def calibrations(self, name: str) -> dict[str, Calibration]:
        """Return the calibrations of a node's GPUs by their UUIDs."""
        known = self._services.planning.calibrations()
        return {device_id: found for (node, device_id), found in known.items() if node == name}

    async def monitor(self) -> AsyncIterator[SampleArrived]:
        """Yield the samples of all nodes as they arrive."""
        # Subscribe before connecting, or the first samples would be lost.
        stream = self._events.stream()
        await self.connect()
        async for event in stream:
            if isinstance(event, SampleArrived) and not event.replayed:
                yield event

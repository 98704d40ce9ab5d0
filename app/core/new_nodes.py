"""Actions that add nodes, install this PC's SSH key on them, and find them at new addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.action import Action, Report, Result, action
from app.errors import HostKeyUnknown, LoginRefused, RunsPrograms, UserError, describe_error
from app.flows.node_list import NodeOutcome
from app.nodes.node import Node, SshAddress, parse_ssh_target, with_key_of

if TYPE_CHECKING:
    from app.core.state import CoreState
    from app.events import NodeSnapshot
    from app.flows.node_list import NodeLine
    from app.nodes.discovery.candidate import PcCandidate
    from app.nodes.key_copy import CopiedKey
    from app.nodes.node import NodeAddress
    from app.nodes.ssh_hosts import SshHost


@action("nodes.resolve")
class ResolveHost(Action["SshHost"]):
    """Return the address that `ssh TARGET` would log in to, by ~/.ssh/config.

    Raises:
        RunsPrograms: it names another command; ask, then call again with it.
        UserError: the target or ~/.ssh/config is malformed.
    """

    target: str
    """`[USER@]HOST[:PORT]`, where the host may be a name of ~/.ssh/config."""
    key: Path | None = None
    """Private key file to use instead of those that it names."""
    agreed: tuple[str, ...] = ()
    """Commands of ~/.ssh/config that the user has agreed to run."""

    async def perform(self, core: CoreState, report: Report) -> SshHost:
        from app.nodes.ssh_hosts import config_files, resolve_host

        files, wanted = config_files(Path.home()), parse_ssh_target(self.target)
        # On a thread: the programs of `Match exec` may take seconds.
        return await asyncio.to_thread(
            resolve_host, wanted, files, key=self.key, agreed=self.agreed
        )


@action("nodes.discover")
class DiscoverPcs(Action["tuple[PcCandidate, ...]"]):
    """Return PCs of ~/.ssh/config and of this network that could become nodes.

    It only opens a TCP connection to their SSH ports.

    Raises:
        UserError: ~/.ssh/config cannot be read.
    """

    async def perform(self, core: CoreState, report: Report) -> tuple[PcCandidate, ...]:
        from app.nodes.discovery.discover import discover

        return await discover([core.fleet.node(name) for name in core.fleet.names()])


@action("nodes.add_list")
class AddNodeList(Action["tuple[NodeOutcome, ...]"]):
    """Add many PCs at once; return the outcome of each line, in order.

    Lines may share jump hosts. Each password is tried once, and discarded with the action.
    """

    lines: tuple[NodeLine, ...]
    """Lines as they were typed."""
    accepted: Mapping[str, str] = field(default_factory=dict)
    """Fingerprint that the user has confirmed, by host as an outcome names it."""
    key: Path | None = None
    """Private key file for all of them, instead of those of ~/.ssh/config."""
    run_programs: bool = False
    """True if programs that ~/.ssh/config names may run."""
    passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Password by account as an outcome names it, with which `CopyKey` installs this PC's key."""

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeOutcome, ...]:
        listed = _ListedNodes(core, self)
        return tuple(await asyncio.gather(*map(listed.add, self.lines)))


@action("nodes.add")
class AddNode(Action["NodeSnapshot"]):
    """Connect to a node, start the agent there, and save the node.

    Raises:
        HostKeyUnknown: first connection; ask the user, then call again with its fingerprint.
        UserError: it cannot be added; nothing is saved.
    """

    name: str
    address: NodeAddress
    accept_host_key: str | None = None

    async def perform(self, core: CoreState, report: Report) -> NodeSnapshot:
        from app.runs.lifecycle.reconcile import search_nodes

        await core.fleet.join(Node(name=self.name, address=self.address), self.accept_host_key)
        core.save_node(self.name)
        # Set since `ConnectNodes`, as in the window: a new node stays connected like the others.
        if core.background.is_on:
            await core.fleet.connect((self.name,))
        # The PC may remember runs of an earlier store, or of this one before its removal.
        await search_nodes(core.services, (self.name,))
        return await core.fleet.refresh(self.name)


@action("nodes.copy_key")
class CopyKey(Action["CopiedKey"]):
    """Install the key that LoginRefused named in an account that refuses this PC's keys.

    The password is used once and not stored.

    Raises:
        HostKeyUnknown: first connection; ask the user, then call again with its fingerprint.
        LoginRefused: the password is wrong, or the key is still refused.
        UserError: the key cannot be added there.
    """

    address: SshAddress
    password: str = field(repr=False)
    accept_host_key: str | None = None

    async def perform(self, core: CoreState, report: Report) -> CopiedKey:
        from app.nodes.key_copy import copy_key

        home = core.services.paths.home
        return await copy_key(
            self.address, self.password, home=home, accept_host_key=self.accept_host_key
        )


@action("nodes.take_back_key")
class TakeBackKey(Action[bool]):
    """Remove the line that `CopyKey` added for a node; return whether it was still there.

    Raises:
        UserError: no line was added there, or the node cannot be reached.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> bool:
        from app.nodes.key_copy import take_back_key

        address = core.fleet.node(self.name).address
        if not isinstance(address, SshAddress):
            raise UserError(f"{self.name} is {address} and needs no key", where=self.name)
        return await take_back_key(address, home=core.services.paths.home)


@action("nodes.set_address")
class SetAddress(Action["NodeSnapshot"]):
    """Use a new address for a node, if it leads to the same PC.

    Raises:
        HostKeyUnknown: the host key differs; ask the user, then call again with its fingerprint.
        UserError: it cannot be reached there, or is another PC; the old address stays.
    """

    name: str
    address: NodeAddress
    accept_host_key: str | None = None
    is_found: bool = False
    """True if a search found the address, and no user chose it."""

    async def perform(self, core: CoreState, report: Report) -> NodeSnapshot:
        await core.fleet.move(
            self.name, self.address, self.accept_host_key, requires_card=self.is_found
        )
        core.save_node(self.name)
        if core.background.is_on:
            await core.fleet.connect((self.name,))
        return core.fleet.snapshot(self.name)


@action("nodes.find")
class FindNode(Action["NodeSnapshot"]):
    """Find a node at a new address of this network, and use that address from now on.

    Raises:
        UserError: no PC of this network has its host key and machine id.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> NodeSnapshot:
        from app.nodes.finder import find_host

        address = core.fleet.node(self.name).address
        if not isinstance(address, SshAddress):
            raise UserError(f"{self.name} is {address} and has no address", where=self.name)
        places = await find_host(address, core.services.paths.home)
        refused = ""
        for place in places:
            try:
                found = SetAddress(name=self.name, address=place, is_found=True)
                return await found.perform(core, report)
            except UserError as error:  # a cloned disk has the same host key
                refused = f" {error.message}"
        raise UserError(
            f"no PC of this network answers as {self.name} at another address than {address.host}."
            f"{refused}",
            "Check that it is on. If it is in another network: rackless nodes set-address "
            f"{self.name} --ssh USER@HOST",
            where=self.name,
        )


class _ListedNodes:
    """Adds the lines of one list."""

    def __init__(self, core: CoreState, request: AddNodeList) -> None:
        self._core = core
        self._request = request
        self._copying = asyncio.Lock()
        self._refused: dict[str, LoginRefused] = {}
        """Accounts that refused their password, with the error."""

    async def add(self, line: NodeLine) -> NodeOutcome:
        """Add one PC and return the outcome."""
        if line.problem:
            return NodeOutcome(line=line, state="failed", message=line.problem)
        try:
            node = await self._add(line.name, await self._resolve(line.target))
        except HostKeyUnknown as error:
            return NodeOutcome(
                line=line,
                state="confirm",
                message=f"{error.host} shows {error.fingerprint}",
                host=error.host,
                fingerprint=error.fingerprint,
            )
        except UserError as error:
            account = error.account if isinstance(error, LoginRefused) else ""
            said = describe_error(error)
            return NodeOutcome(line=line, state="failed", message=said, account=account)
        return NodeOutcome(line=line, state="added", message=node.address)

    async def _resolve(self, target: str) -> SshAddress:
        """Return the address of a target; with `run_programs`, agree to each of its programs."""
        agreed: tuple[str, ...] = ()
        while True:
            ask = ResolveHost(target=target, key=self._request.key, agreed=agreed)
            try:
                return (await self._do(ask)).address
            except RunsPrograms as error:
                if not self._request.run_programs:
                    raise
                agreed = (*agreed, error.command)

    async def _add(self, name: str, address: SshAddress) -> NodeSnapshot:
        for host in self._core.hosts_with_key.values():
            address = with_key_of(address, host)
        accepted: str | None = None
        passed = set[str]()
        while True:
            try:
                return await self._do(AddNode(name=name, address=address, accept_host_key=accepted))
            except HostKeyUnknown as error:
                if (
                    error.host in passed
                    or self._request.accepted.get(error.host) != error.fingerprint
                ):
                    raise
                passed.add(error.host)
                accepted = error.fingerprint
            except LoginRefused as error:
                account = error.account
                if account in passed or account not in self._request.passwords:
                    raise
                passed.add(account)
                address = await self._let_in(address, account, accepted)
                # The fingerprint is stored by now; the next host on the way has its own.
                accepted = None

    async def _let_in(self, address: SshAddress, account: str, accepted: str | None) -> SshAddress:
        """Install this PC's key in an account on the way; return the address with that key."""
        # Serialized: PCs may share a jump host, where each password is tried once, and the key that
        # the first call creates serves the others.
        async with self._copying:
            if account in self._refused:
                raise self._refused[account]
            if account in self._core.hosts_with_key:
                return with_key_of(address, self._core.hosts_with_key[account])
            password = self._request.passwords[account]
            ask = CopyKey(address=address, password=password, accept_host_key=accepted)
            try:
                copied = await self._do(ask)
            except LoginRefused as error:
                self._refused[account] = error
                raise
            self._core.hosts_with_key[account] = copied.host
            return copied.address

    async def _do(self, action: Action[Result]) -> Result:
        return await action.perform(self._core, lambda event: None)

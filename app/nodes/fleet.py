"""All nodes of the master: their connections, snapshots and clients.

A node is connected on demand, by `connect` (which also follows its telemetry) or by a client's
first request, and stays connected until the fleet closes. All tasks live in one group.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from agents.contract.node import NodeFacts
from agents.contract.requests.node import ReadFacts
from app.errors import HostKeyUnknown, RacklessError, UserError
from app.events import EventHub, NodeChanged, NodeRemoved, NodeSnapshot
from app.nodes.client import NodeClient
from app.nodes.link import Link, open_link
from app.nodes.node import Node, NodeAddress, SshAddress, transport_of, with_identity
from app.nodes.watch import NodeWatch

if TYPE_CHECKING:
    from app.nodes.archive import AgentArchive

MAX_CONNECTS = 8
"""Maximum number of connections opened at the same time; beyond it sshd drops some
(MaxStartups)."""
ANSWER_S = 10.0
"""Time in which a node has to answer to be compared with another PC, in seconds."""


class Fleet:
    """Async context manager; leaving it closes every link and ends every task."""

    def __init__(self, home: Path, events: EventHub) -> None:
        self._home = home
        self._events = events
        self._gate = asyncio.Semaphore(MAX_CONNECTS)
        self._archive: AgentArchive | None = None
        # Serializes the first build of the archive.
        self._building = asyncio.Lock()
        self._nodes: dict[str, Node] = {}
        self._watches: dict[str, NodeWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, NodeSnapshot] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Fleet:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        # The block's own error is not passed on: the group would wrap it into an ExceptionGroup.
        await self._group.__aexit__(None, None, None)

    # ------------------------------------------------------------ adding and removing

    def names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def node(self, name: str) -> Node:
        """Return a node that was added.

        Raises:
            UserError: there is no node of this name.
        """
        try:
            return self._nodes[name]
        except KeyError:
            known = ", ".join(self._nodes) or "none"
            raise UserError(
                f"There is no node called {name!r}; known: {known}",
                "Add it first: rackless nodes add NAME --ssh USER@HOST",
                where=name,
            ) from None

    def host_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Return the fingerprint of the confirmed host key of each node that has one."""
        from app.nodes.identity import fingerprint_at

        found = {name: fingerprint_at(self.node(name), self._home) for name in names}
        return {name: key for name, key in found.items() if key}

    def add(self, node: Node) -> None:
        """Register a stored node. Does not connect."""
        self._nodes[node.name] = node
        self._events.publish(NodeChanged(self.snapshot(node.name)))

    def learn(self, name: str, facts: NodeFacts) -> Node | None:
        """Store the identity from a node's facts; return the changed node, or None if nothing is
        new.
        """
        old = self._nodes.get(name)
        node = with_identity(old, facts) if old else None
        if node is None or node == old:
            return None
        self._nodes[name] = node
        return node

    async def change(self, node: Node) -> None:
        """Take a registered node's new address or identity, such as another process stored."""
        old = self.node(node.name)
        self._nodes[node.name] = node
        if old.address == node.address:
            return
        watched = node.name in self._watches
        await self._stop_watching(node.name)
        self._last.pop(node.name, None)
        self._events.publish(NodeChanged(self.snapshot(node.name)))
        if watched:
            await self.connect((node.name,))

    async def move(
        self,
        name: str,
        address: NodeAddress,
        accept_host_key: str | None = None,
        *,
        requires_card: bool = False,
    ) -> NodeSnapshot:
        """Use another address for a node from now on, if the same PC answers there.

        The host key that was confirmed for the old address is accepted without asking.

        Args:
            name: name of the node.
            address: new address.
            accept_host_key: fingerprint that the user has confirmed for it.
            requires_card: refuse a PC without the network card by which the node was reached, since
                no user has chosen the address.

        Raises:
            HostKeyUnknown: the host shows another key; ask, and call again with its fingerprint.
            UserError: it cannot be reached there, or is another PC.
        """
        from app.nodes.identity import (
            fingerprint_at,
            refuse_clone,
            require_card,
            require_same,
            tell_apart,
        )

        old = self.node(name)
        node = replace(old, address=address)
        self._require_free(node)
        keep_key = self._is_known_host(address)
        known = fingerprint_at(old, self._home)
        try:
            node, facts = await self._get_to_know(node, accept_host_key, known)
            require_same(replace(node, identity=old.identity), node.identity)
            if requires_card:
                require_card(old, node, facts)
            known_facts = await self._ask_now(name)
            if known_facts is not None and (unlike := tell_apart(known_facts, facts)):
                raise refuse_clone(node, old, unlike)
        except HostKeyUnknown as error:
            error.reword(f"{error.message} {name} had another at {old.address}.", error.hint)
            raise
        except BaseException:
            if not keep_key:
                self._forget_host(address)
            raise
        await self.change(node)
        self._forget_unused(old.address)
        self._last[name] = _snapshot(node, "online", facts)
        return self.snapshot(name)

    async def join(
        self, node: Node, accept_host_key: str | None = None
    ) -> tuple[NodeSnapshot, NodeFacts]:
        """Connect to a new node, start its agent, and register it if that succeeds.

        On failure nothing is kept, not even a confirmed host key.

        Raises:
            HostKeyUnknown: show the fingerprint, ask, and call again with it.
            UserError: why it cannot be added.
        """
        # Imported on use, here and below: lists need no identity.
        from app.nodes.identity import find_twins, refuse_clone, refuse_twin, tell_apart

        if node.name in self._nodes:
            raise UserError(
                f"There is already a node called {node.name}",
                f"Choose another name, or remove it: rackless nodes remove {node.name}",
            )
        self._require_free(node)
        # A key that another node has confirmed must survive a failed join.
        keep_key = self._is_known_host(node.address)
        # No watch yet: it would publish a node that may still be rejected as a twin.
        try:
            node, facts = await self._get_to_know(node, accept_host_key)
            for twin in find_twins(node, self._nodes.values(), self._home):
                known = await self._ask_now(twin.name)
                if known is not None and (unlike := tell_apart(known, facts)):
                    raise refuse_clone(node, twin, unlike)
                # Another folder of the agent on one PC is that of another user.
                if twin.identity == node.identity:
                    raise refuse_twin(node, twin)
        except BaseException:
            if not keep_key:
                self._forget_host(node.address)
            raise
        self.add(node)
        self._last[node.name] = _snapshot(node, "online", facts)
        self._events.publish(NodeChanged(self._last[node.name]))
        return self._last[node.name], facts

    async def _ask_now(self, name: str) -> NodeFacts | None:
        """Return the facts of a registered node, or None if it does not answer soon."""
        node = self.node(name)
        with contextlib.suppress(RacklessError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                # On a link of its own: that of a watch may be to a PC that is gone.
                return await self._fetch_facts(name, await self._open(node))
        return None

    async def _fetch_facts(self, name: str, link: Link) -> NodeFacts:
        """Fetch the facts of a node over this link, and close it."""
        try:
            return await NodeClient(name, _HeldLink(link)).ask(ReadFacts())
        finally:
            await link.close()

    def _require_free(self, node: Node) -> None:
        """Raise UserError if another node has this address."""
        for other in self._nodes.values():
            if other.name != node.name and _is_same_place(node.address, other.address):
                raise UserError(
                    f"{node.address} is already a node: {other.name}",
                    f"Use that one, or remove it first: rackless nodes remove {other.name}",
                )

    async def _get_to_know(
        self, node: Node, accept: str | None, known: str | None = None
    ) -> tuple[Node, NodeFacts]:
        """Connect to a node's address, fetch its facts, and return it with its identity.

        Args:
            node: may still be rejected, so it gets no watch, which would publish it.
            accept: fingerprint that the user has confirmed for this address.
            known: fingerprint that the user has confirmed for another address of the same PC.
        """
        try:
            link = await self._open(node, accept)
        except HostKeyUnknown as error:
            if error.fingerprint != known:
                raise
            link = await self._open(node, known)
        facts = await self._fetch_facts(node.name, link)
        return with_identity(node, facts), facts

    async def remove(self, name: str) -> None:
        """Disconnect and unregister a node; forget its host key unless another node shares it."""
        node = self.node(name)
        # First, or the watch might publish a node that is gone.
        await self._stop_watching(name)
        del self._nodes[name]
        self._last.pop(name, None)
        self._forget_unused(node.address)
        self._events.publish(NodeRemoved(name))

    # ------------------------------------------------------------ connecting

    def snapshot(self, name: str) -> NodeSnapshot:
        """Return the current state of a node."""
        node = self.node(name)
        watch = self._watches.get(name)
        if watch is not None:
            return watch.snapshot
        return self._last.get(name) or _snapshot(node, "connecting", None)

    def snapshots(self) -> tuple[NodeSnapshot, ...]:
        return tuple(self.snapshot(name) for name in self._nodes)

    async def connect(self, names: Iterable[str] = ()) -> None:
        """Keep nodes connected from now on, with their telemetry; empty: all nodes.

        Returns at once; NodeChanged events report the outcome. Refused nodes are retried, too.
        """
        for name in tuple(names) or self.names():
            watch = self._watch(name)
            watch.follow_samples()
            if watch.snapshot.state != "online":
                watch.retry()

    def client(self, name: str) -> NodeClient:
        """Return a handle that connects on its first request and reconnects after a loss.

        Raises:
            UserError: there is no such node.
        """
        self.node(name)
        return NodeClient(name, _OnDemand(self, name))

    async def refresh(self, name: str) -> NodeSnapshot:
        """Fetch the facts of a node and return its snapshot.

        Raises:
            UserError: it cannot be reached.
        """
        facts = await self.client(name).ask(ReadFacts())
        watch = self._watch(name)
        watch.remember(facts)
        return watch.snapshot

    async def reach(self, names: Iterable[str] = ()) -> tuple[NodeSnapshot, ...]:
        """Fetch the facts of nodes (empty: of all) and return their snapshots.

        A node that does not answer is not an error.
        """
        chosen = tuple(names) or self.names()
        looks = (self.refresh(self.node(name).name) for name in chosen)
        # Bugs are raised; an unreachable node is a state of its snapshot.
        for outcome in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, UserError):
                raise outcome
        return tuple(self.snapshot(name) for name in chosen)

    async def link(self, name: str) -> Link:
        """Return the link to a node; open it if necessary.

        Raises:
            UserError: it cannot be opened.
        """
        return await self._watch(name).link()

    # ------------------------------------------------------------ inside

    def _watch(self, name: str) -> NodeWatch:
        if name not in self._watches:
            watch = NodeWatch(self.node(name), self._open, self._events)
            self._watches[name] = watch
            self._tasks[name] = self._group.create_task(watch.run(), name=f"node {name}")
        return self._watches[name]

    async def _stop_watching(self, name: str) -> None:
        self._watches.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _open(self, node: Node, accept_host_key: str | None = None) -> Link:
        # Without the lock each of the first connections would build an archive of its own.
        async with self._building:
            if self._archive is None:
                # Imported on use: commands that reach no node start sooner.
                from app.nodes.archive import build_archive

                self._archive = await asyncio.to_thread(build_archive)
        try:
            return await open_link(
                node,
                self._archive,
                home=self._home,
                gate=self._gate,
                accept_host_key=accept_host_key,
            )
        except UserError as error:
            from app.nodes.identity import explain_key

            raise explain_key(error, node, self._nodes.values(), self._home) from None

    def _is_known_host(self, address: NodeAddress) -> bool:
        if not isinstance(address, SshAddress):
            return True
        from app.nodes.transport.host_keys import HostKeys

        return HostKeys(self._home).find(address) is not None

    def _forget_host(self, address: NodeAddress) -> None:
        if isinstance(address, SshAddress):
            from app.nodes.transport.host_keys import HostKeys

            HostKeys(self._home).forget(address)

    def _forget_unused(self, address: NodeAddress) -> None:
        """Forget the host keys of an abandoned address, except those that another node needs."""
        if not isinstance(address, SshAddress):
            return
        others = [one.address for one in self._nodes.values()]
        used = {h.known_as for one in others if isinstance(one, SshAddress) for h in one.hops}
        for hop in address.hops:
            if hop.known_as not in used:
                self._forget_host(hop)


class _OnDemand:
    """Link provider that asks the fleet each time, so that a client survives reconnects."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    async def __call__(self) -> Link:
        return await self._fleet.link(self._name)


class _HeldLink:
    """Link provider for a single link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def __call__(self) -> Link:
        return self._link


def _snapshot(node: Node, state: str, facts: NodeFacts | None) -> NodeSnapshot:
    return NodeSnapshot(
        name=node.name,
        transport=transport_of(node.address),
        address=str(node.address),
        state="online" if state == "online" else "connecting",
        facts=facts,
    )


def _is_same_place(one: NodeAddress, other: NodeAddress) -> bool:
    """Return True if both lead to the same user's home on the same PC, regardless of the key."""
    if isinstance(one, SshAddress) and isinstance(other, SshAddress):
        return _same_host(one, other) and one.user == other.user
    return one == other


def _same_host(one: NodeAddress, other: NodeAddress) -> bool:
    if not isinstance(one, SshAddress) or not isinstance(other, SshAddress):
        return False
    return one.known_as == other.known_as

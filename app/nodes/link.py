"""A node that can be talked to: an open connection with a started agent on it.

Raw bytes travel on connections of their own. On the agent's, a ping would wait behind megabytes
that a slow network has not taken yet, and the node would look dead while it is sent a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from agents.contract.messages import Hello
from app.nodes.archive import AgentArchive
from app.nodes.bootstrap import start_agent
from app.nodes.channel import MasterChannel
from app.nodes.node import Node
from app.nodes.transport.connection import Connection, connect
from app.nodes.transport.process import Process

CLOSE_GRACE_S = 2.0


class Link:
    """Owns the connection and the channel; `close` ends both and leaves no process behind."""

    def __init__(
        self,
        node: Node,
        connection: Connection,
        channel: MasterChannel,
        connect_again: Callable[[], Awaitable[Connection]],
    ) -> None:
        self.node = node
        self.channel = channel
        self._connection = connection
        self._connect_again = connect_again

    @property
    def hello(self) -> Hello:
        return self.channel.hello

    async def open_command(self, *arguments: str) -> Process:
        """Start another command of the agent's archive, such as `receive models/m`.

        Closing the process closes the connection that it has for itself.

        Raises:
            UserError: there is no second connection, or the node starts no further command.
        """
        archive = f"{self.hello.agent_home}/agents/{self.hello.archive_sha256}.zip"
        connection = await self._connect_again()
        try:
            process = await connection.open(("python3", "-I", archive, *arguments))
        except BaseException:
            await connection.close()
            raise
        process.close_with(connection.close)
        return process

    async def close(self) -> None:
        try:
            await self.channel.close(CLOSE_GRACE_S)
        finally:
            await self._connection.close()


async def open_link(
    node: Node,
    archive: AgentArchive,
    *,
    home: Path,
    gate: asyncio.Semaphore,
    accept_host_key: str | None = None,
) -> Link:
    """Connect to `node` and start its agent.

    Args:
        home: the master's folder.
        gate: limits how many nodes are connected to at the same time.
        accept_host_key: fingerprint that a person has confirmed for a first contact.

    Raises:
        UserError: one of its kinds, see `connect` and `start_agent`.
    """

    async def connect_again() -> Connection:
        async with gate:
            return await connect(node.address, home=home)

    async with gate:
        connection = await connect(node.address, home=home, accept_host_key=accept_host_key)
        try:
            agent = await start_agent(connection, archive, f"{node.name} ({node.address})")
        except BaseException:
            await connection.close()
            raise
    return Link(node, connection, MasterChannel(agent, node.name), connect_again)

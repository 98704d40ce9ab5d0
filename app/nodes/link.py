"""A link to a node: an open connection with a started agent on it.

Transfers of raw bytes use separate connections. On the agent's connection a ping would queue behind
megabytes on a slow network, and the node would look dead while it receives a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.messages import Hello
from app.errors import located
from app.nodes.bootstrap import start_agent
from app.nodes.channel import MasterChannel
from app.nodes.node import Node
from app.nodes.transport.connection import Connection, connect
from app.nodes.transport.process import Process

if TYPE_CHECKING:
    from app.nodes.archive import AgentArchive

CLOSE_GRACE_S = 2.0
"""Time for the agent to exit after a shutdown request, in seconds."""


class Link:
    """Owner of the connection and the channel; `close` ends both and leaves no process behind."""

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

        Closing the process also closes its own connection.

        Raises:
            UserError: no second connection is possible, or the node refuses another command.
        """
        # The agent itself runs from this archive, so it is on the node already.
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
        home: folder of the master.
        gate: limits how many connections are opened at the same time.
        accept_host_key: fingerprint that the user has confirmed for a first contact.

    Raises:
        UserError: one of its kinds, see `connect` and `start_agent`.
    """

    async def connect_again() -> Connection:
        async with gate:
            return await connect(node.address, home=home)

    async with gate:
        with located(node.name):
            connection = await connect(node.address, home=home, accept_host_key=accept_host_key)
        try:
            with located(node.name):
                agent = await start_agent(connection, archive, f"{node.name} ({node.address})")
        except BaseException:
            await connection.close()
            raise
    return Link(node, connection, MasterChannel(agent, node.name), connect_again)

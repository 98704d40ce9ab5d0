"""The interface to a node: start a command there and use its stdio.

The kind of address chooses one of three implementations: `ssh`, `local` and `wsl`. They know
nothing of the agent; `bootstrap` and `channel` implement the protocol on a command's stdio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from app.nodes.node import LocalAddress, NodeAddress, SshAddress, WslAddress
from app.nodes.transport.local import LocalConnection, WslConnection
from app.nodes.transport.process import Process


class Connection(Protocol):
    """An open connection to a node."""

    async def open(self, argv: Sequence[str]) -> Process:
        """Start `argv` on the node, without a terminal.

        Raises:
            NodeUnreachable: the connection broke, or the node refuses another command.
        """
        ...

    async def close(self) -> None:
        """Close the connection. Commands that still use it lose their stdio."""
        ...


async def connect(
    address: NodeAddress, *, home: Path, accept_host_key: str | None = None
) -> Connection:
    """Open a connection to `address`.

    Args:
        home: folder of the master, which holds the confirmed host keys.
        accept_host_key: fingerprint that the user has confirmed for a first contact.

    Raises:
        NodeUnreachable: it does not answer, or not with SSH.
        HostKeyUnknown: first contact, and no fingerprint was given.
        HostKeyChanged: the host key is not the confirmed one.
        LoginRefused: there is no usable key, or the node accepts none.
    """
    match address:
        case SshAddress():
            # Importing asyncssh takes 0.25 s, which a master with only local nodes does not need.
            from app.nodes.transport.ssh import connect_ssh

            return await connect_ssh(address, home=home, accept_host_key=accept_host_key)
        case LocalAddress():
            from app.hub.token_keyring import environ_with_token

            # Commands download from the hub themselves, but cannot read the keyring.
            return LocalConnection(await asyncio.to_thread(environ_with_token, home))
        case WslAddress():
            return WslConnection(address)

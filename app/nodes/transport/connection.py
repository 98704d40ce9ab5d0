"""The one seam between us and a node: open a command there, talk to it through its stdio.

Three implementations, chosen by the kind of address: `ssh`, `local` and `wsl`. None of them knows
the agent; what is said over a command's stdio is the business of `bootstrap` and `channel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from app.nodes.node import LocalAddress, NodeAddress, SshAddress, WslAddress
from app.nodes.transport.local import LocalConnection, WslConnection
from app.nodes.transport.process import Process


class Connection(Protocol):
    """An open way to a node."""

    async def open(self, argv: Sequence[str]) -> Process:
        """Start `argv` on the node, without a terminal.

        Raises:
            NodeUnreachable: the connection broke, or the node lets no further command start.
        """
        ...

    async def close(self) -> None:
        """Let go of the node. What still runs through this connection loses its stdio."""
        ...


async def connect(
    address: NodeAddress, *, home: Path, accept_host_key: str | None = None
) -> Connection:
    """Open a way to `address`.

    Args:
        home: the master's folder; confirmed host keys live in it.
        accept_host_key: fingerprint that a person has confirmed for a first contact.

    Raises:
        NodeUnreachable: there is no way, or nothing there that speaks SSH.
        HostKeyUnknown: first contact, and no fingerprint was given.
        HostKeyChanged: the host key is not the confirmed one.
        LoginRefused: no usable key, or the node accepts none.
    """
    match address:
        case SshAddress():
            # 0.25 s of import that a master with local nodes only need not pay.
            from app.nodes.transport.ssh import connect_ssh

            return await connect_ssh(address, home=home, accept_host_key=accept_host_key)
        case LocalAddress():
            return LocalConnection()
        case WslAddress():
            return WslConnection(address)

"""Connect to another PC: one SSH connection with any number of commands on it.

The steps (resolve the host, open the port, handshake, log in) are separate, so that an error names
the one that failed. `~/.ssh/config` is not read here; the address is complete. A host behind others
is reached through a connection to each of them, whose key is confirmed as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import asyncssh

from app.errors import LoginRefused, NodeUnreachable
from app.nodes.node import SshAddress
from app.nodes.transport.host_key_judge import HostKeyJudge
from app.nodes.transport.host_keys import HostKeys
from app.nodes.transport.login_keys import load_login_keys
from app.nodes.transport.process import WRITE_AHEAD_BYTES, Process
from app.nodes.transport.ssh_login import Password, SshRoute, log_in

# Maximum time for a command to start, in seconds.
_OPEN_TIMEOUT_S = 20.0


async def connect_ssh(
    address: SshAddress, *, home: Path, accept_host_key: str | None = None
) -> SshConnection:
    """Log in to `address`; raises what `app.nodes.transport.connection.connect` lists."""
    return await _connect(address, home, accept_host_key, None)


async def connect_with_password(
    address: SshAddress, password: str, *, home: Path, accept_host_key: str | None = None
) -> SshConnection:
    """Log in with a password to the first host on the route that accepts none of our keys.

    Returns a connection to that host; to `address` itself if all hosts accept our keys.

    Raises:
        LoginRefused: the password is wrong, or the host takes none.
        UserError: what `app.nodes.transport.connection.connect` lists.
    """
    return await _connect(address, home, accept_host_key, password)


async def _connect(
    address: SshAddress, home: Path, accept_host_key: str | None, password: str | None
) -> SshConnection:
    opened: list[asyncssh.SSHClientConnection] = []
    try:
        for hop in address.hops:
            reach = partial(_reach, hop, opened[-1] if opened else None, HostKeys(home))
            try:
                connection, is_new = await reach(accept_host_key)
            except LoginRefused as error:
                if password is None or not error.account:
                    raise
                connection, _ = await reach(accept_host_key, password)
                return SshConnection(hop, [*opened, connection], by_password=True)
            opened.append(connection)
            # It was the key of this host, so it says nothing about the next one.
            accept_host_key = None if is_new else accept_host_key
    except BaseException:
        for connection in reversed(opened):
            connection.abort()
        raise
    return SshConnection(address, opened)


async def _reach(
    address: SshAddress,
    through: asyncssh.SSHClientConnection | None,
    host_keys: HostKeys,
    accept_host_key: str | None,
    password: str | None = None,
) -> tuple[asyncssh.SSHClientConnection, bool]:
    """Return the connection to one host, and True if this login confirmed its key. `through` is the
    connection to the host before it, if there is one.
    """
    # Host keys are verified by our own code: asyncssh raises the same error for an unknown and for
    # a changed key.
    judge = HostKeyJudge(address, host_keys.find(address), accept_host_key)
    if password is not None:
        connection = await log_in(SshRoute(address, through), judge, Password(password))
    else:
        keys = await load_login_keys(address)
        try:
            connection = await log_in(SshRoute(address, through), judge, keys)
        finally:
            await keys.close()
    # After the login: a first contact that fails leaves no confirmed key behind.
    if judge.to_confirm is not None:
        host_keys.confirm(address, judge.to_confirm)
    return connection, judge.to_confirm is not None


class SshConnection:
    """An open SSH connection, and those that it is tunnelled through."""

    def __init__(
        self,
        address: SshAddress,
        connections: Sequence[asyncssh.SSHClientConnection],
        *,
        by_password: bool = False,
    ) -> None:
        """`connections`: one for each host on the route, the node's own last."""
        self.address = address
        self.by_password = by_password
        self._connection = connections[-1]
        self._hops = connections[:-1]

    async def open(self, argv: Sequence[str]) -> Process:
        process = Process(self._lost, self._find_peer())
        # `exec` spares one shell process; every login shell knows it, fish and csh as well.
        command = "exec " + shlex.join(argv)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await self._connection.create_session(
                    lambda: _Session(process), command, encoding=None, request_pty=False
                )
        except asyncssh.ChannelOpenError as error:
            raise NodeUnreachable(
                f"{self.address} refuses to start another command: {error.reason}",
                "If it refuses sessions, raise MaxSessions in its /etc/ssh/sshd_config",
            ) from error
        except TimeoutError as error:
            raise self._lost(f"it started no command within {_OPEN_TIMEOUT_S:.0f} s") from error
        except (asyncssh.Error, OSError) as error:
            raise self._lost(str(error)) from error
        return process

    async def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connection.wait_closed(), 2.0)
        # A peer that is gone never confirms the close.
        self._connection.abort()
        for connection in reversed(self._hops):
            connection.abort()

    def _find_peer(self) -> str:
        """Return the address that our TCP connection leads to; "" if it is not the node's."""
        if self._hops or self.address.proxy_command is not None:
            return ""
        place = self._connection.get_extra_info("peername")
        return str(place[0]) if place else ""

    def _lost(self, reason: str) -> NodeUnreachable:
        return NodeUnreachable(
            f"The connection to {self.address} was lost: {reason}",
            "Check that the PC is on and its network works; runs on it keep training",
        )


class _Session(asyncssh.SSHClientSession[bytes]):
    """Forwards the events of a channel to its `Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._channel: asyncssh.SSHClientChannel[bytes] | None = None

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        chan.set_write_buffer_limits(high=WRITE_AHEAD_BYTES)
        self._channel = chan
        self._process.attach(chan)

    def data_received(self, data: bytes, datatype: int | None) -> None:
        (self._process.feed if datatype is None else self._process.feed_stderr)(data)

    def eof_received(self) -> bool:
        self._process.end_output()
        # True: the channel stays open for our input after the end of its output.
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._channel is not None:
            self._process.exited(self._channel.get_returncode())
        self._process.closed(None if exc is None else str(exc))

    def pause_writing(self) -> None:
        self._process.pause_writing()

    def resume_writing(self) -> None:
        self._process.resume_writing()

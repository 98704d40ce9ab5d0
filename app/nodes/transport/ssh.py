"""Connect to another PC: one SSH connection with any number of commands on it.

The steps (resolve the host, open the port, handshake, log in) are separate, so that an error names
the one that failed. Host keys are verified by our own code: asyncssh raises the same error for an
unknown and for a changed key. `~/.ssh/config` is not read here; the address says it all. A host
behind others is reached through a connection to each of them, whose key is confirmed as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from agents.contract.python_child import SAFE_FOLDER
from app.errors import HostKeyChanged, HostKeyUnknown, NodeUnreachable, UserError
from app.nodes.node import SshAddress
from app.nodes.transport.host_keys import HostKeys, fingerprint_of
from app.nodes.transport.login_keys import LoginKeys, load_login_keys
from app.nodes.transport.process import WRITE_AHEAD_BYTES, Process
from app.nodes.transport.ssh_errors import (
    jump_failed,
    login_refused,
    no_common_host_key,
    ssh_failed,
    tcp_failed,
)
from app.nodes.transport.ssh_offer import read_host_key_types

CONNECT_TIMEOUT_S = 8.0
"""Maximum duration of resolving the host and opening the port, in seconds."""
LOGIN_TIMEOUT_S = 20.0
"""Maximum duration of handshake and login, in seconds; slow PCs need several for the key."""
# Maximum time for a command to start, in seconds.
_OPEN_TIMEOUT_S = 20.0
# A dead connection is noticed within about three seconds, like a missing answer to a ping.
_KEEPALIVE_INTERVAL_S = 1
_KEEPALIVE_MISSES = 2
# aes128-gcm costs half of the default chacha20 per byte where the CPU has AES instructions.
_CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
    "aes128-ctr",
    "aes256-ctr",
)
HOST_KEY_ALGORITHMS = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    # One RSA key signs in several ways; the one with SHA-1, also called ssh-rsa, is left out.
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
_ALL_HOST_KEY_ALGORITHMS = tuple(name for names in HOST_KEY_ALGORITHMS.values() for name in names)
# How a handshake ends when the host has none of the requested key types; the server may disconnect
# before our own side has noticed.
_NO_COMMON_KEY_TYPE = (asyncssh.KeyExchangeFailed, asyncssh.ConnectionLost)


async def connect_ssh(
    address: SshAddress, *, home: Path, accept_host_key: str | None = None
) -> SshConnection:
    """Log in to `address`; raises what `app.nodes.transport.connection.connect` lists."""
    opened: list[asyncssh.SSHClientConnection] = []
    try:
        for hop in address.hops:
            way = opened[-1] if opened else None
            connection, is_new = await _reach(hop, way, HostKeys(home), accept_host_key)
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
    way: asyncssh.SSHClientConnection | None,
    host_keys: HostKeys,
    accept_host_key: str | None,
) -> tuple[asyncssh.SSHClientConnection, bool]:
    """Return the connection to one host, and whether its key was confirmed by this login.

    `way`: connection to the host before it; None: there is none.
    """
    judge = _HostKeyJudge(address, host_keys.find(address), accept_host_key)
    keys = await load_login_keys(address)
    try:
        connection = await _log_in(_Way(address, way), judge, keys)
    finally:
        await keys.close()
    # After the login: a first contact that fails leaves no confirmed key behind.
    if judge.to_confirm is not None:
        host_keys.confirm(address, judge.to_confirm)
    return connection, judge.to_confirm is not None


class SshConnection:
    """An open SSH connection, and those that it goes through."""

    def __init__(
        self, address: SshAddress, connections: Sequence[asyncssh.SSHClientConnection]
    ) -> None:
        """`connections`: one for each host on the way, the node's own last."""
        self._address = address
        self._connection = connections[-1]
        self._way = connections[:-1]

    async def open(self, argv: Sequence[str]) -> Process:
        process = Process(self._lost)
        # `exec` spares one shell process; every login shell knows it, fish and csh as well.
        command = "exec " + shlex.join(argv)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await self._connection.create_session(
                    lambda: _Session(process), command, encoding=None, request_pty=False
                )
        except asyncssh.ChannelOpenError as error:
            raise NodeUnreachable(
                f"{self._address} refuses to start another command: {error.reason}",
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
        for connection in reversed(self._way):
            connection.abort()

    def _lost(self, reason: str) -> NodeUnreachable:
        return NodeUnreachable(
            f"The connection to {self._address} was lost: {reason}",
            "Check that the PC is on and its network works; runs on it keep training",
        )


class _HostKeyJudge:
    """Comparison of the key that the host shows with the confirmed one."""

    def __init__(
        self, address: SshAddress, known: asyncssh.SSHKey | None, accepted: str | None
    ) -> None:
        self._address = address
        self._known = known
        self._accepted = accepted
        self.to_confirm: asyncssh.SSHKey | None = None
        self.verdict: UserError | None = None

    def algorithms(self) -> tuple[str, ...]:
        """Return the types to request: that of the known key, so that a host with keys of several
        types always shows the same one.
        """
        if self._known is None:
            return _ALL_HOST_KEY_ALGORITHMS
        name = self._known.get_algorithm()
        return HOST_KEY_ALGORITHMS.get(name, _ALL_HOST_KEY_ALGORITHMS)

    def accepts(self, key: asyncssh.SSHKey) -> bool:
        shown = fingerprint_of(key)
        if self._known is not None:
            if key.public_data == self._known.public_data:
                return True
            self.verdict = HostKeyChanged(self._address.label, fingerprint_of(self._known), shown)
        elif self._accepted is None:
            self.verdict = HostKeyUnknown(self._address.label, shown)
        elif self._accepted != shown:
            self.verdict = UserError(
                f"{self._address.label} shows the host key {shown}, "
                f"but the key to accept is {self._accepted}",
                "Compare both with 'ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub' on that PC. "
                "If neither is its key, somebody is between you and it",
            )
        else:
            self.to_confirm = key
        return self.verdict is None


class _Client(asyncssh.SSHClient):
    def __init__(self, judge: _HostKeyJudge) -> None:
        self._judge = judge

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        return self._judge.accepts(key)


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


@dataclass(frozen=True, slots=True)
class _Way:
    """How one host is reached."""

    address: SshAddress
    through: asyncssh.SSHClientConnection | None
    """Connection to the host before it; None: there is none."""

    async def open(self) -> dict[str, Any]:
        """Return the arguments of asyncssh that lead to the host, with an open port if we open it.

        Raises:
            NodeUnreachable: the port cannot be opened.
        """
        if self.through is not None:
            return {"tunnel": self.through}
        if self.address.proxy_command is not None:
            return await _run_proxy(self.address.proxy_command)
        return {"sock": await _open_port(self.address)}


async def _run_proxy(command: str) -> dict[str, Any]:
    """Start a program of ~/.ssh/config in a shell, as OpenSSH does; it ends with its connection."""
    if sys.platform == "win32":  # its programs take no socket for their input
        return {"proxy_command": [os.environ.get("COMSPEC", "cmd.exe"), "/c", command]}
    ours, its = socket.socketpair()
    try:
        # Not by asyncssh, which takes what the program says on stderr for a part of the connection.
        await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", f"exec {command}"),
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd=SAFE_FOLDER,
        )
    except OSError:
        ours.close()
        raise
    finally:
        its.close()
    ours.setblocking(False)
    return {"sock": ours}


async def _log_in(way: _Way, judge: _HostKeyJudge, keys: LoginKeys) -> asyncssh.SSHClientConnection:
    try:
        return await _handshake(way, judge, keys, judge.algorithms())
    except _NO_COMMON_KEY_TYPE as error:
        # The host has no key of the confirmed type any more: connect again with all types, so
        # that the error can name the key it has now.
        if judge.algorithms() == _ALL_HOST_KEY_ALGORITHMS:
            raise await _explain(way, error) from error
    try:
        return await _handshake(way, judge, keys, _ALL_HOST_KEY_ALGORITHMS)
    except _NO_COMMON_KEY_TYPE as error:
        raise await _explain(way, error) from error


async def _explain(way: _Way, error: Exception) -> NodeUnreachable:
    """Return the error for a handshake that failed, apparently without a common key type."""
    opened = (await way.open()).get("sock")
    # None: the way is a channel of another connection.
    offered = await read_host_key_types(opened) if opened is not None else ()
    if offered and not set(offered) & set(_ALL_HOST_KEY_ALGORITHMS):
        return no_common_host_key(way.address, offered)
    return ssh_failed(way.address, error)


async def _handshake(
    way: _Way, judge: _HostKeyJudge, keys: LoginKeys, algorithms: Sequence[str]
) -> asyncssh.SSHClientConnection:
    address = way.address
    place = await way.open()
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S):
            return await asyncssh.connect(
                address.host,
                address.port,
                **place,
                # ~/.ssh/config could replace the host, user or key of the address.
                config=None,
                client_factory=lambda: _Client(judge),
                known_hosts=([], [], []),  # empty, so that every key goes to the judge
                server_host_key_algs=list(algorithms),
                x509_trusted_certs=None,
                username=address.user,
                client_keys=keys.pairs or None,
                # The agent's keys are among `client_keys` already.
                agent_path=None,
                preferred_auth=["publickey"],
                password_auth=False,
                kbdint_auth=False,
                host_based_auth=False,
                gss_kex=False,
                gss_auth=False,
                encryption_algs=list(_CIPHERS),
                keepalive_interval=_KEEPALIVE_INTERVAL_S,
                keepalive_count_max=_KEEPALIVE_MISSES,
                connect_timeout=None,
                login_timeout=LOGIN_TIMEOUT_S,
            )
    except asyncssh.ChannelOpenError as error:
        raise jump_failed(address, error) from error
    except _NO_COMMON_KEY_TYPE as error:
        if judge.verdict is not None:
            raise judge.verdict from error
        raise
    except (asyncssh.Error, OSError, TimeoutError, ValueError) as error:
        # asyncssh reports a rejected key like any failed handshake; the judge knows better.
        if judge.verdict is not None:
            raise judge.verdict from error
        if isinstance(error, asyncssh.PermissionDenied):
            raise login_refused(address, keys) from error
        raise ssh_failed(address, error) from error
    finally:
        if judge.verdict is not None and "sock" in place:
            place["sock"].close()


async def _open_port(address: SshAddress) -> socket.socket:
    """Return a connected socket, trying each address of the host in turn."""
    loop = asyncio.get_running_loop()
    failure: Exception = OSError("no address")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, place in found:
                opened = socket.socket(family, kind, protocol)
                try:
                    opened.setblocking(False)
                    await loop.sock_connect(opened, place)
                    return opened
                except OSError as error:
                    opened.close()
                    failure = error
                except BaseException:
                    # The deadline cancels the connect; the socket must not leak then, either.
                    opened.close()
                    raise
    except (OSError, TimeoutError, UnicodeError) as error:
        failure = error
    raise tcp_failed(address, failure, CONNECT_TIMEOUT_S) from failure

"""Reach a host, shake hands, and log in with keys or with a password."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncssh

from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from app.errors import NodeUnreachable
from app.nodes.node import SshAddress
from app.nodes.transport.host_key_judge import ALL_HOST_KEY_ALGORITHMS, HostKeyJudge
from app.nodes.transport.login_keys import LoginKeys
from app.nodes.transport.ssh_errors import (
    Asked,
    jump_failed,
    login_refused,
    no_common_host_key,
    password_refused,
    ssh_failed,
    tcp_failed,
)

OFFER_TIMEOUT_S = 5.0
"""Maximum duration of reading the offer, in seconds."""
_KEXINIT = 20
_COOKIE_BYTES = 16
_MAX_BANNER_LINES = 64
# RFC 4253, 6.1: packet size that every implementation must accept, in bytes.
_MAX_PACKET_BYTES = 35_000
CONNECT_TIMEOUT_S = 8.0
"""Maximum duration of resolving the host and opening the port, in seconds."""
LOGIN_TIMEOUT_S = 20.0
"""Maximum duration of handshake and login, in seconds; slow PCs need several for the key."""
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
# Errors of a handshake with a host that has none of the requested key types; the server may
# disconnect before our own side has noticed.
_NO_COMMON_KEY_TYPE = (asyncssh.KeyExchangeFailed, asyncssh.ConnectionLost)


@dataclass(frozen=True, slots=True)
class Password:
    """Password for one login; it is neither stored nor shown anywhere."""

    text: str = field(repr=False)


Login = LoginKeys | Password


class _Client(asyncssh.SSHClient):
    def __init__(self, judge: HostKeyJudge, login: Login) -> None:
        self._judge = judge
        self._password = login.text if isinstance(login, Password) else None
        self.asked: Asked = "nothing"
        """Authentication that the host has asked for, besides a key."""

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        return self._judge.accepts(key)

    def password_auth_requested(self) -> str | None:
        return self._take()

    def kbdint_auth_requested(self) -> str | None:
        return None if self._password is None else ""

    def kbdint_challenge_received(
        self, name: str, instructions: str, lang: str, prompts: Sequence[tuple[str, bool]]
    ) -> Sequence[str] | None:
        if not prompts:
            return []
        # Several questions, or a visible answer, ask for something other than a password.
        if len(prompts) > 1 or prompts[0][1]:
            self.asked = "more"
            return None
        answer = self._take()
        return None if answer is None else [answer]

    def _take(self) -> str | None:
        """Return the password once: a wrong one, tried again, would count towards fail2ban."""
        self.asked = "password"
        password, self._password = self._password, None
        return password


@dataclass(frozen=True, slots=True)
class SshRoute:
    """Route to one host: directly, through another host, or through a program."""

    address: SshAddress
    through: asyncssh.SSHClientConnection | None
    """Connection to the host before it, or None."""

    async def open(self) -> dict[str, Any]:
        """Return asyncssh's arguments that lead to the host, with an open socket if we open it.

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
    else:
        ours, its = socket.socketpair()
        try:
            # Not by asyncssh, which takes the program's stderr for a part of the connection.
            await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", f"exec {command}"),
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=asyncio.subprocess.DEVNULL,
                env=python_environ(os.environ),
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


async def log_in(
    route: SshRoute, judge: HostKeyJudge, login: Login
) -> asyncssh.SSHClientConnection:
    """Return a new connection to a host.

    Raises:
        LoginRefused: it lets in none of the keys, or not the password.
        UserError: what `app.nodes.transport.connection.connect` lists.
    """
    try:
        return await _handshake(route, judge, login, judge.algorithms())
    except _NO_COMMON_KEY_TYPE as error:
        # The host has no key of the confirmed type any more: connect again with all types, so
        # that the error can name the key it has now.
        if judge.algorithms() == ALL_HOST_KEY_ALGORITHMS:
            raise await _explain(route, error) from error
    try:
        return await _handshake(route, judge, login, ALL_HOST_KEY_ALGORITHMS)
    except _NO_COMMON_KEY_TYPE as error:
        raise await _explain(route, error) from error


async def _explain(route: SshRoute, error: Exception) -> NodeUnreachable:
    """Return the error for a failed handshake, apparently without a common key type."""
    opened = (await route.open()).get("sock")
    # None: the host is reached through a channel of another connection.
    offered = await read_host_key_types(opened) if opened is not None else ()
    if offered and not set(offered) & set(ALL_HOST_KEY_ALGORITHMS):
        return no_common_host_key(route.address, offered)
    return ssh_failed(route.address, error)


async def _handshake(
    route: SshRoute, judge: HostKeyJudge, login: Login, algorithms: Sequence[str]
) -> asyncssh.SSHClientConnection:
    address = route.address
    place = await route.open()
    client = _Client(judge, login)
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S):
            return await asyncssh.connect(
                address.host,
                address.port,
                **place,
                # ~/.ssh/config could replace the host, user or key of the address.
                config=None,
                client_factory=lambda: client,
                known_hosts=([], [], []),  # empty, so that every key goes to the judge
                server_host_key_algs=list(algorithms),
                x509_trusted_certs=None,
                username=address.user,
                # LoginKeys has the agent's keys already.
                agent_path=None,
                **_ways_to_prove(login),
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
            if isinstance(login, Password):
                raise password_refused(address, client.asked) from error
            raise login_refused(address, login) from error
        raise ssh_failed(address, error) from error
    finally:
        if judge.verdict is not None and "sock" in place:
            place["sock"].close()


def _ways_to_prove(login: Login) -> dict[str, Any]:
    """Return asyncssh's arguments for the login: keys or a password."""
    by_password = isinstance(login, Password)
    return {
        "client_keys": None if isinstance(login, Password) else login.pairs or None,
        "preferred_auth": ["password", "keyboard-interactive"] if by_password else ["publickey"],
        "public_key_auth": not by_password,
        "password_auth": by_password,
        "kbdint_auth": by_password,
    }


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


# ---------------------------------------------------------------- host key types


async def read_host_key_types(opened: socket.socket) -> tuple[str, ...]:
    """Return the host key algorithms that the server offers, and disconnect.

    Returns an empty tuple if it sends no such list. Takes at most OFFER_TIMEOUT_S.
    """
    # OpenSSH disconnects silently from a client that shares no type of host key with it, and
    # asyncssh does not keep the offer; so it is requested once more, to be named in the error.
    with contextlib.suppress(OSError, EOFError, ValueError, struct.error, TimeoutError):
        async with asyncio.timeout(OFFER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(sock=opened)
            try:
                writer.write(b"SSH-2.0-Rackless\r\n")
                return await _read_offer(reader)
            finally:
                writer.close()
    return ()


async def _read_offer(reader: asyncio.StreamReader) -> tuple[str, ...]:
    for _ in range(_MAX_BANNER_LINES):  # RFC 4253, 4.2: lines of text may come before the version
        if (await reader.readline()).startswith(b"SSH-"):
            break
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    if not 0 < size <= _MAX_PACKET_BYTES:
        return ()
    return parse_host_key_types(await reader.readexactly(size))


def parse_host_key_types(packet: bytes) -> tuple[str, ...]:
    """Return the second list of a KEXINIT packet (RFC 4253, 7.1); empty: it is another packet.

    Raises:
        struct.error: the packet is truncated.
    """
    if len(packet) < 2 or packet[1] != _KEXINIT:  # packet[0] is the length of the padding
        return ()
    place = 2 + _COOKIE_BYTES
    (size,) = struct.unpack_from(">I", packet, place)
    place += 4 + size  # skips the first list, the key exchange algorithms
    (size,) = struct.unpack_from(">I", packet, place)
    names = packet[place + 4 : place + 4 + size].decode("ascii", "replace")
    return tuple(name for name in names.split(",") if name)

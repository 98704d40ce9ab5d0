"""Find a PC at a new address in this home network, by its host key.

The SSH port is tried at the 254 neighbours of the old address and of this PC. Hosts that answer are
asked for their host key, which needs no login.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncssh

from app.errors import UserError
from app.nodes.node import SshAddress
from app.nodes.own_address import ANYWHERE, own_address_toward
from app.nodes.transport.host_key_judge import HOST_KEY_ALGORITHMS
from app.nodes.transport.host_keys import HostKeys

PORT_TIMEOUT_S = 1.5
KEY_TIMEOUT_S = 5.0
MAX_AT_ONCE = 64
"""Number of addresses that are tried at the same time."""


async def find_host(address: SshAddress, home: Path) -> tuple[SshAddress, ...]:
    """Return the addresses of this network, `address` excepted, that show its confirmed host key.

    Raises:
        UserError: no key was confirmed for it, or it is in no network that can be searched.
    """
    if address.jumps or address.proxy_command is not None:
        raise UserError(
            f"{address} is reached through another host; its network cannot be searched",
            "Give the new address: rackless nodes set-address NAME --ssh USER@HOST",
        )
    key = HostKeys(home).find(address)
    if key is None:
        raise UserError(f"no host key was confirmed for {address}", "Add the node again.")
    # On a thread: the old address may be a name, which takes seconds to resolve.
    near = await asyncio.to_thread(lambda: set(_neighbours(address.host)))
    hosts = sorted(near - {address.host}, key=ipaddress.ip_address)
    if not hosts:
        raise UserError(
            f"{address.host} is in no private IPv4 network, so it cannot be searched",
            "Give the new address: rackless nodes set-address NAME --ssh USER@HOST",
        )
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def look(host: str) -> bool:
        async with gate:
            return await _is_open(host, address.port) and await _shows(host, address.port, key)

    answers = await asyncio.gather(*(look(host) for host in hosts))
    return tuple(
        replace(address, host=host) for host, found in zip(hosts, answers, strict=True) if found
    )


def _neighbours(host: str) -> Iterator[str]:
    """Yield the neighbours of the old address and of this PC's own, in private networks."""
    for near in (_as_ipv4(host), _own_address(host)):
        if near is not None and near.is_private and not near.is_loopback:
            yield from map(str, ipaddress.ip_network(f"{near}/24", strict=False).hosts())


def _as_ipv4(text: str) -> ipaddress.IPv4Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.IPv4Address(text)
    return None


def _own_address(host: str) -> ipaddress.IPv4Address | None:
    """Return this PC's address on the route to `host`, or to the internet; sends nothing."""
    for target in (host, ANYWHERE):
        if (found := own_address_toward(target, socket.AF_INET)) is not None:
            return _as_ipv4(found)
    return None


async def _is_open(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(PORT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _shows(host: str, port: int, key: asyncssh.SSHKey) -> bool:
    name = key.get_algorithm()
    with contextlib.suppress(OSError, TimeoutError, asyncssh.Error):
        # A server with keys of several types must show the type that was confirmed.
        async with asyncio.timeout(KEY_TIMEOUT_S):
            shown = await asyncssh.get_server_host_key(
                host, port, server_host_key_algs=HOST_KEY_ALGORITHMS.get(name, [name])
            )
        return shown is not None and shown.public_data == key.public_data
    return False

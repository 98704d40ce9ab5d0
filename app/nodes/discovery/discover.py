"""Collect PCs that could become nodes: from ~/.ssh/config, mDNS and the neighbour table.

A candidate sees only a TCP connection to its SSH port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import UserError
from app.nodes.discovery.candidate import PcCandidate, PortState, Source, name_overlay
from app.nodes.discovery.mdns import Announced, ask_mdns
from app.nodes.discovery.neighbours import Neighbour, own_addresses, read_neighbours
from app.nodes.node import DEFAULT_SSH_PORT, Node, SshAddress
from app.nodes.ssh_hosts import SshHost, config_files, list_ssh_hosts

PORTS = (DEFAULT_SSH_PORT, 2222)
"""SSH ports that are tried: the usual one, and the usual one of a WSL distro."""
PORT_TIMEOUT_S = 1.0
MAX_AT_ONCE = 64
MAX_BANNER_BYTES = 255
# Accounts of code hosting, which give no shell.
_NO_SHELL_USERS = frozenset({"git"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Names and addresses from the sources, before any connection."""

    ssh_hosts: tuple[SshHost, ...] = ()
    announced: tuple[Announced, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    own: dict[str, str]
    """This PC's addresses and the network device of each."""


async def discover(nodes: Iterable[Node]) -> tuple[PcCandidate, ...]:
    """Return the candidates of this network, those that answer first.

    Neighbours whose SSH ports are closed are left out: telephones, printers, televisions.

    Raises:
        UserError: ~/.ssh/config cannot be read.
    """
    own = await asyncio.to_thread(own_addresses)
    ssh_hosts, neighbours, announced = await asyncio.gather(
        asyncio.to_thread(lambda: list_ssh_hosts(config_files(Path.home()))),
        asyncio.to_thread(read_neighbours),
        ask_mdns(own),
    )
    sources = Sources(ssh_hosts=ssh_hosts, announced=announced, neighbours=neighbours, own=own)
    return await try_candidates(list_candidates(sources), nodes, sources)


def list_candidates(sources: Sources) -> tuple[PcCandidate, ...]:
    """Merge the entries of the sources into one candidate per host and port."""
    found: dict[tuple[str, int], PcCandidate] = {}

    def put(one: PcCandidate) -> None:
        known = found.get((one.host or one.target, one.port))
        if known is None:
            found[one.host or one.target, one.port] = one
        else:
            both = tuple(dict.fromkeys((*known.sources, *one.sources)))
            better = replace(known, sources=both, name=known.name or one.name)
            found[one.host, one.port] = better

    for host in sources.ssh_hosts:
        if host.address.user not in _NO_SHELL_USERS:
            put(_from_config(host.address))
    for one in sources.announced:
        put(_at(one.address, one.port, "mdns", one.name))
    for neighbour in sources.neighbours:
        if neighbour.address not in sources.own:
            for port in PORTS:
                put(_at(neighbour.address, port, "neighbour"))
    return tuple(found.values())


async def try_candidates(
    candidates: Iterable[PcCandidate], nodes: Iterable[Node], sources: Sources
) -> tuple[PcCandidate, ...]:
    """Return the candidates with the state of their SSH ports, and mark those that are nodes."""
    gate = asyncio.Semaphore(MAX_AT_ONCE)
    places = {
        (n.address.host, n.address.port): n.name for n in nodes if isinstance(n.address, SshAddress)
    }
    devices = {one.address: one.interface for one in sources.neighbours}

    async def look(one: PcCandidate) -> tuple[str, PcCandidate]:
        if one.state == "not-tried":
            return one.target, one
        async with gate:
            address, banner = await _read_banner(one.host, one.port)
        device = devices.get(address, "") or await asyncio.to_thread(
            _device_to, address, sources.own
        )
        state: PortState = "closed" if banner is None else "open"
        return address, replace(
            one,
            state=state,
            banner=banner or "",
            overlay=name_overlay(address, device),
            node=places.get((one.host, one.port)) or places.get((address, one.port)) or "",
        )

    tried: dict[tuple[str, int], PcCandidate] = {}
    for address, one in await asyncio.gather(*(look(one) for one in candidates)):
        # A host name of ~/.ssh/config and an address of the network may be one PC.
        first = tried.setdefault((address, one.port), one)
        if first is not one:
            both = tuple(dict.fromkeys((*first.sources, *one.sources)))
            tried[address, one.port] = replace(first, sources=both)
    shown = [one for one in tried.values() if one.state != "closed" or _was_named(one)]
    order = {"open": 0, "not-tried": 1, "closed": 2}
    return tuple(sorted(shown, key=lambda one: (order[one.state], one.name or "~", one.host)))


def _was_named(one: PcCandidate) -> bool:
    """Return True if the user or the PC itself named it; then a closed port is shown, too."""
    return one.sources != ("neighbour",)


def _from_config(address: SshAddress) -> PcCandidate:
    is_direct = not address.jumps and address.proxy_command is None
    return PcCandidate(
        target=address.alias or address.host,
        host=address.host if is_direct else "",
        port=address.port,
        name=address.alias or address.host,
        sources=("ssh-config",),
        state="closed" if is_direct else "not-tried",
    )


def _at(host: str, port: int, source: Source, name: str = "") -> PcCandidate:
    target = host if port == DEFAULT_SSH_PORT else f"{host}:{port}"
    return PcCandidate(
        target=target, host=host, port=port, name=name, sources=(source,), state="closed"
    )


async def _read_banner(host: str, port: int) -> tuple[str, str | None]:
    """Return the address reached and the banner, or None if no SSH server answers."""
    address = host
    try:
        async with asyncio.timeout(PORT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_BANNER_BYTES)
    except (OSError, TimeoutError, UnicodeError):
        return address, None
    try:
        address = str(writer.get_extra_info("peername")[0])
        async with asyncio.timeout(PORT_TIMEOUT_S):
            # The server sends its banner first, so nothing is sent to a PC that may not be the
            # user's.
            line = await reader.readline()
    except (OSError, TimeoutError, ValueError):
        return address, None
    finally:
        writer.close()
    banner = line.decode("ascii", "replace").strip()
    return address, banner if banner.startswith("SSH-") else None


def _device_to(address: str, own: dict[str, str]) -> str:
    """Return the network device that leads to an address, or "" if unknown; sends nothing."""
    with (
        contextlib.suppress(OSError, UserError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
    ):
        one.connect((address, 9))
        return own.get(one.getsockname()[0], "")
    return ""

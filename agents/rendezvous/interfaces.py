"""The network interface on which the ranks of a node listen.

Gloo and NCCL are configured with the name of an interface. Without it, Gloo resolves the host name
and NCCL may use several interfaces.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from typing import Any

from agents.errors import ExpectedError

LOOPBACK_DEVICE = "lo"
# linux/netlink.h and linux/rtnetlink.h
_NETLINK_GETADDR, _NETLINK_NEWADDR, _NETLINK_ERROR, _NETLINK_DONE = 22, 20, 2, 3
_NETLINK_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")


def bind_to(address: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on one address of this PC.

    Raises:
        OSError: the port is taken, or the address belongs to another PC or means all interfaces.
    """
    family, place = _find_place(address, port)
    return socket.create_server(place, family=family, backlog=backlog)


def hold_port(address: str, port: int) -> socket.socket:
    """Return a socket that holds a port of one address without listening; 0: any free port.

    Callers are refused. A listener that names the port still gets it, but nothing else does.

    Raises:
        OSError: as for `bind_to`.
    """
    family, place = _find_place(address, port)
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As `create_server` does; without it on both, the listener would be refused.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(place)
    except OSError:
        held.close()
        raise
    return held


def _find_place(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    # An empty address would resolve to all interfaces; "?" fails.
    family, _, _, _, place = socket.getaddrinfo(address or "?", port, type=socket.SOCK_STREAM)[0]
    # Checked after resolving: `0` and `0x0` are spellings of 0.0.0.0, too.
    if is_many(str(place[0])):
        raise OSError(f"{address} stands for more than one interface")
    return family, place[:2]


def is_many(address: str) -> bool:
    """Return whether a numeric address is unspecified, multicast or broadcast."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None) or found
    return mapped.is_unspecified or mapped.is_multicast or str(mapped) == "255.255.255.255"


def name_interface(address: str, named: str | None = None) -> str:
    """Return the interface that has `address`, else the one that the master named.

    Raises:
        ExpectedError: no interface of this PC has the address.
    """
    found = find_interface(address) or named
    if not found:
        raise ExpectedError(
            f"No network interface of this node has the address {address}, at which the other "
            "nodes would reach it.",
            "Connect to the node at its own address, not through a forwarded port: rackless nodes "
            "add NAME --ssh USER@ADDRESS",
        )
    return found


def listen_on(interface: str) -> dict[str, str]:
    """Return the environment variables that make Gloo and NCCL use this interface only."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        # NCCL treats the name as a prefix unless `=` precedes it: eth1 would match eth10.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        # The RAS service would open another port, without authentication.
        "NCCL_RAS_ENABLE": "0",
    }


def choose_variables(first_address: str, is_first: bool) -> dict[str, str]:
    """Return the variables of `listen_on` for the interface that leads to rank 0.

    Raises:
        ExpectedError: no interface of this PC leads there.
    """
    address = resolve(first_address) if is_first else find_route(first_address)
    interface = find_interface(address) if address else None
    if interface is None:
        raise ExpectedError(
            f"No network interface of this node leads to rank 0 at {first_address}.",
            "Check the network between the nodes: rackless check",
        )
    return listen_on(interface)


def find_interface(address: str) -> str | None:
    """Return the interface of this PC that has the address, or None."""
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(address.partition("%")[0])
        if wanted.is_loopback:
            return LOOPBACK_DEVICE
        for device, found in read_addresses():
            if found == wanted:
                return device
    return None


def find_route(address: str) -> str | None:
    """Return this PC's source address on the route to another, or None without a route.

    Nothing is sent: connecting a UDP socket only looks up the route.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asker:
            asker.connect(place)
            return str(asker.getsockname()[0])
    return None


def resolve(address: str) -> str | None:
    """Return the numeric address of a host name, or None if it is unknown."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(address, None)[0][4][0])
    return None


def read_addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Return (device, address) of every address of this PC, in the kernel's order."""
    found = []
    with contextlib.suppress(OSError, struct.error):
        for device, address in _dump_addresses():
            with contextlib.suppress(OSError, ValueError):
                found.append((socket.if_indextoname(device), ipaddress.ip_address(address)))
    return found


def _dump_addresses() -> list[tuple[int, bytes]]:
    # rtnetlink lists IPv6 and secondary addresses, which the ioctl SIOCGIFADDR does not.
    question = _HEADER.pack(
        _HEADER.size + _ADDRESS.size, _NETLINK_GETADDR, _NETLINK_DUMP, 1, 0
    ) + _ADDRESS.pack(0, 0, 0, 0, 0)
    found: list[tuple[int, bytes]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(5.0)
        kernel.send(question)
        while True:
            block = kernel.recv(1 << 16)
            while block:
                length, kind = _HEADER.unpack_from(block)[:2]
                if kind in (_NETLINK_DONE, _NETLINK_ERROR):
                    return found
                if kind == _NETLINK_NEWADDR:
                    found.append(_read_address(block[_HEADER.size : length]))
                block = block[_align(length) :]


def _read_address(message: bytes) -> tuple[int, bytes]:
    device = _ADDRESS.unpack_from(message)[4]
    values, place = {}, _ADDRESS.size
    while place + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, place)
        values[kind] = message[place + _ATTRIBUTE.size : place + length]
        place += _align(max(length, _ATTRIBUTE.size))
    # On a point-to-point link, IFA_ADDRESS is the address of the other end.
    return device, values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b""))


def _align(length: int) -> int:
    # NLMSG_ALIGN and RTA_ALIGN: messages and attributes start at multiples of 4 bytes.
    return (length + 3) & ~3

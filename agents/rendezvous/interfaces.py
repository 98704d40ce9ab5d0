"""The one network interface on which the ranks of a node listen.

Gloo and NCCL take the name of an interface; without one they choose by the name of the host or
listen on several.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct

from agents.errors import ExpectedError

LOOPBACK_DEVICE = "lo"
_NETLINK_GETADDR, _NETLINK_NEWADDR, _NETLINK_ERROR, _NETLINK_DONE = 22, 20, 2, 3
_NETLINK_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")


def bind_to(address: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on one address of this PC.

    Raises:
        OSError: the address is not one of this PC's, means all of them, or the port is taken.
    """
    family, _, _, _, place = socket.getaddrinfo(address or "?", port, type=socket.SOCK_STREAM)[0]
    # Asked of the resolved one: `0` and `0x0` too are spellings of 0.0.0.0.
    if is_many(str(place[0])):
        raise OSError(f"{address} stands for more than one interface")
    return socket.create_server(place[:2], family=family, backlog=backlog)


def is_many(address: str) -> bool:
    """Return whether an address in numbers stands for all of a PC's, or for a group of PCs."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None) or found
    return mapped.is_unspecified or mapped.is_multicast or str(mapped) == "255.255.255.255"


def name_interface(address: str, named: str | None = None) -> str:
    """Return the interface with `address`, or the one that the master named.

    Raises:
        ExpectedError: no interface of this PC has that address.
    """
    found = find_interface(address) or named
    if not found:
        raise ExpectedError(
            f"No network interface of this node has the address {address}, at which the other "
            "nodes would reach it.",
            "Reach the node at an address of its own, not through a forwarded port: rackless nodes "
            "add NAME --ssh USER@ADDRESS",
        )
    return found


def listen_on(interface: str) -> dict[str, str]:
    """Return the variables with which Gloo and NCCL listen on that interface alone."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        # NCCL takes a name as a prefix unless `=` precedes it: eth1 would match eth10.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        # Its status service would listen on a port of its own, for anyone on this PC.
        "NCCL_RAS_ENABLE": "0",
    }


def choose_variables(first_address: str, is_first: bool) -> dict[str, str]:
    """Return `listen_on` for a rank that only knows rank 0: the interface that leads there.

    Raises:
        ExpectedError: there is no way, or it leaves by no interface of this PC.
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
    """Return the interface of this PC that has the address; None: none has."""
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(address.partition("%")[0])
        if wanted.is_loopback:
            return LOOPBACK_DEVICE
        for device, found in read_addresses():
            if found == wanted:
                return device
    return None


def find_route(address: str) -> str | None:
    """Return our own address on the way to another PC; None: there is no way. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asker:
            asker.connect(place)
            return str(asker.getsockname()[0])
    return None


def resolve(address: str) -> str | None:
    """Return the address in numbers of a name; None: there is none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(address, None)[0][4][0])
    return None


def read_addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Return (device, address) of every address of this PC, as the kernel lists them."""
    found = []
    with contextlib.suppress(OSError, struct.error):
        for device, address in _dump_addresses():
            with contextlib.suppress(OSError, ValueError):
                found.append((socket.if_indextoname(device), ipaddress.ip_address(address)))
    return found


def _dump_addresses() -> list[tuple[int, bytes]]:
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
    # On a point-to-point link IFA_ADDRESS is that of the other end.
    return device, values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b""))


def _align(length: int) -> int:
    return (length + 3) & ~3

"""Wake a PC over the network: the magic packet, its destination, and sending it."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from agents.contract.names import check_device

PORTS = (9, 7)
"""UDP ports of the packet; the network card reacts to it, so no program has to listen there."""
EVERYBODY = "255.255.255.255"
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WakeTarget:
    """Network card that a packet can wake."""

    mac: str
    """Hardware address, such as `aa:bb:cc:dd:ee:ff`."""
    broadcast: str
    """IPv4 broadcast address of its network, such as 192.168.1.255."""
    device: str
    """Name of the network device on that PC."""
    is_on: bool | None = None
    """True if the card waits for such packets (`ethtool`: Wake-on g); None: not known."""

    def __post_init__(self) -> None:
        if not _MAC.fullmatch(self.mac):
            raise ValueError(f"mac is {self.mac!r}; it has six pairs of hex digits")
        check_device("device", self.device)
        # Raises ValueError for anything but an IPv4 address.
        ipaddress.IPv4Address(self.broadcast)


def magic_packet(mac: str) -> bytes:
    """Return the magic packet: six bytes of ones, then the address sixteen times.

    >>> len(magic_packet("aa:bb:cc:dd:ee:ff"))
    102
    """
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def send_magic_packet(target: WakeTarget, sources: Iterable[str] = ("",)) -> int:
    """Send the packet to the target's network and to the local one; return the number sent.

    Args:
        target: network card to wake.
        sources: own addresses to send from, to reach each of several networks; "": any.
    """
    packet, num_sent = magic_packet(target.mac), 0
    for source in sources:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sender.bind((source, 0))
            # A router drops 255.255.255.255, but may forward the directed broadcast of another
            # network.
            for address in (target.broadcast, EVERYBODY):
                for port in PORTS:
                    with contextlib.suppress(OSError):  # no route to that network from there
                        sender.sendto(packet, (address, port))
                        num_sent += 1
    return num_sent

"""Wake a PC over its network: the magic packet, where it has to go, and sending it."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

PORTS = (9, 7)
"""UDP ports that a packet goes to: no program has to listen there, the network card does."""
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
    """Whether the card waits for such packets (`ethtool`: Wake-on g); None: it does not say."""

    def __post_init__(self) -> None:
        if not _MAC.fullmatch(self.mac):
            raise ValueError(f"mac is {self.mac!r}; it has six pairs of hex digits")
        ipaddress.IPv4Address(self.broadcast)


def magic_packet(mac: str) -> bytes:
    """Return six bytes of ones and the address sixteen times.

    >>> len(magic_packet("aa:bb:cc:dd:ee:ff"))
    102
    """
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def send_magic_packet(target: WakeTarget, sources: Iterable[str] = ("",)) -> int:
    """Send the packet to the target's network and to the own one; return how many went out.

    `sources`: own addresses to send from, so that each of several networks gets one; "": any.
    """
    packet, num_sent = magic_packet(target.mac), 0
    for source in sources:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            one.bind((source, 0))
            for address in (target.broadcast, EVERYBODY):
                for port in PORTS:
                    with contextlib.suppress(OSError):  # that network is not reached from there
                        one.sendto(packet, (address, port))
                        num_sent += 1
    return num_sent

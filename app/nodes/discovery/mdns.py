"""Find PCs that announce SSH or themselves on the local network: a one-shot mDNS query.

A query from another port than 5353 is answered directly (RFC 6762, 6.7), so nothing has to listen,
join a group or compete with the system's own responder. python-zeroconf would also keep a browser
and a cache, which are not needed here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

GROUP = ("224.0.0.251", 5353)
SERVICES = ("_ssh._tcp.local", "_workstation._tcp.local")
WAIT_S = 1.5
"""Time to wait for answers, in seconds; responders delay theirs by up to 0.5 s."""
_A, _PTR, _SRV = 1, 12, 33
_IN = 1
_UNICAST = 0x8000
# Limits against damaged or hostile packets.
_MAX_NAME_PARTS = 64
_MAX_ANSWERS = 1024


@dataclass(frozen=True, slots=True)
class Announced:
    """A PC from its own announcement."""

    name: str
    """Display name, such as `gamer-pc`."""
    address: str
    port: int
    """SSH port; 22 if the PC announces only itself."""


async def ask_mdns(
    sources: Iterable[str], group: tuple[str, int] = GROUP, wait_s: float = WAIT_S
) -> tuple[Announced, ...]:
    """Return the PCs that answer within `wait_s`, asked from each of this PC's addresses."""
    loop = asyncio.get_running_loop()
    collected = _Collected()
    transports = []
    for source in sources:
        try:
            transport, _ = await loop.create_datagram_endpoint(
                lambda: _Receiver(collected), sock=_open_socket(source)
            )
        except OSError:  # the address is gone, or multicast is not allowed there
            continue
        transports.append(transport)
        transport.sendto(make_query(SERVICES), group)
    try:
        if transports:
            await asyncio.sleep(wait_s)
    finally:
        for transport in transports:
            transport.close()
    return collected.announced()


def make_query(services: Iterable[str]) -> bytes:
    """Return a query for the instances of services, to be answered to the sending port."""
    asked = list(services)
    questions = b"".join(
        # The top bit of the class requests a unicast answer (RFC 6762, 5.4).
        _encode_name(name) + struct.pack(">HH", _PTR, _IN | _UNICAST)
        for name in asked
    )
    return struct.pack(">6H", 0, 0, len(asked), 0, 0, 0) + questions


@dataclass(slots=True)
class Records:
    """Records of answers, by their kind."""

    instances: set[str] = field(default_factory=set)
    """Full names of service instances."""
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Instance -> (host name, port)."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Host name -> IPv4 address."""


def parse_answer(packet: bytes) -> Records:
    """Return the records of an answer; of a damaged packet those before the damage."""
    records = Records()
    try:
        for name, kind, data_at, data_end in _read_records(packet):
            if kind == _PTR and name in SERVICES:
                records.instances.add(_read_name(packet, data_at)[0])
            elif kind == _SRV:
                (port,) = struct.unpack_from(">H", packet, data_at + 4)
                records.places[name] = (_read_name(packet, data_at + 6)[0], port)
            elif kind == _A and data_end - data_at == 4:
                records.addresses[name] = socket.inet_ntoa(packet[data_at:data_end])
    except (struct.error, ValueError, IndexError, OSError):
        pass  # any PC can send anything to this port
    return records


class _Collected:
    def __init__(self) -> None:
        self._records = Records()

    def add(self, packet: bytes) -> None:
        found, all_ = parse_answer(packet), self._records
        if len(all_.instances) < _MAX_ANSWERS:
            all_.instances |= found.instances
            all_.places.update(found.places)
            all_.addresses.update(found.addresses)

    def announced(self) -> tuple[Announced, ...]:
        found: dict[tuple[str, int], Announced] = {}
        for instance in sorted(self._records.instances):
            host, port = self._records.places.get(instance, ("", 0))
            address = self._records.addresses.get(host)
            if address is None:
                continue
            name = host.removesuffix(".local")
            # A workstation announces port 9 or 0: discard, which is no service.
            is_ssh = instance.endswith(SERVICES[0])
            one = Announced(name, address, port if is_ssh and port else 22)
            found.setdefault((one.address, one.port), one)
        return tuple(found.values())


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, collected: _Collected) -> None:
        self._collected = collected

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        self._collected.add(data)


def _open_socket(source: str) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        opened.setblocking(False)
        opened.bind((source, 0))
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(source))
        # RFC 6762, 11: 255, though answers are judged by their network today.
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    except OSError:
        opened.close()
        raise
    return opened


def _read_records(packet: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, type, start and end of the data) of each record of a packet."""
    _, _, num_questions, *counts = struct.unpack_from(">6H", packet)
    place = 12
    for _ in range(num_questions):
        place = _read_name(packet, place)[1] + 4
    for _ in range(min(sum(counts), _MAX_ANSWERS)):
        name, place = _read_name(packet, place)
        kind, _, _, size = struct.unpack_from(">HHIH", packet, place)
        place += 10
        yield name, kind, place, place + size
        place += size


def _read_name(packet: bytes, place: int) -> tuple[str, int]:
    """Return the name at `place` in lower case, and the position after it.

    Raises:
        ValueError: it has too many parts, such as a name whose pointers form a loop.
    """
    parts: list[str] = []
    behind: int | None = None
    for _ in range(_MAX_NAME_PARTS):
        size = packet[place]
        if size == 0:
            return ".".join(parts).lower(), place + 1 if behind is None else behind
        if size >= 0xC0:  # a pointer: the rest is elsewhere in the packet (RFC 1035, 4.1.4)
            behind = place + 2 if behind is None else behind
            place = struct.unpack_from(">H", packet, place)[0] & 0x3FFF
            continue
        parts.append(packet[place + 1 : place + 1 + size].decode("utf-8", "replace"))
        place += 1 + size
    raise ValueError("a name without an end")


def _encode_name(name: str) -> bytes:
    labels = (label.encode() for label in name.split("."))
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"

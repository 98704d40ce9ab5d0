"""A PC that announces itself by mDNS: answers that a responder such as Avahi would send."""

from __future__ import annotations

import socket
import struct
import sys


def label(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def announcement(host: str, address: str, port: int) -> bytes:
    """Return an answer with PTR, SRV and A records whose names point back (RFC 1035, 4.1.4)."""
    packet = bytearray(struct.pack(">6H", 0, 0x8400, 0, 1, 0, 2))
    service_at = len(packet)
    packet += label("_ssh") + label("_tcp")
    local_at = len(packet)
    packet += label("local") + b"\0"
    pointer = struct.pack(">H", 0xC000 | service_at)
    instance = label(host.capitalize()) + pointer
    packet += struct.pack(">HHIH", 12, 1, 120, len(instance))
    instance_at = len(packet)
    packet += instance
    target = label(host) + struct.pack(">H", 0xC000 | local_at)
    packet += struct.pack(">H", 0xC000 | instance_at)
    packet += struct.pack(">HHIH", 33, 0x8001, 120, 6 + len(target)) + struct.pack(
        ">3H", 0, 0, port
    )
    host_at = len(packet)
    packet += target
    packet += struct.pack(">H", 0xC000 | host_at) + struct.pack(">HHIH", 1, 0x8001, 120, 4)
    packet += socket.inet_aton(address)
    return bytes(packet)


def main(address: str) -> None:
    """Answer queries for SSH that come to the group, on the network of `address`, until killed."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", 5353))
    member = socket.inet_aton("224.0.0.251") + socket.inet_aton(address)
    listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    print("ready", flush=True)
    while True:
        query, asker = listener.recvfrom(9000)
        if b"\x04_ssh\x04_tcp\x05local" in query:
            listener.sendto(announcement("gamer", address, 22), asker)


if __name__ == "__main__":
    main(sys.argv[1])

"""Read the types of host keys that an SSH server offers, from its first message.

OpenSSH disconnects silently from a client that shares no type of host key with it, and asyncssh
does not keep the offer; so it is requested once more, to be named in the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

OFFER_TIMEOUT_S = 5.0
"""Maximum duration of reading the offer, in seconds."""
_KEXINIT = 20
_COOKIE_BYTES = 16
_MAX_BANNER_LINES = 64
# RFC 4253, 6.1: packet size that every implementation must accept, in bytes.
_MAX_PACKET_BYTES = 35_000


async def read_host_key_types(opened: socket.socket) -> tuple[str, ...]:
    """Return the host key algorithms that the server offers, and disconnect.

    Empty: it sends no such list. Takes at most OFFER_TIMEOUT_S.
    """
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

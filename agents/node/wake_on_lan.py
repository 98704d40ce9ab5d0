"""Read what waking this PC over its network takes: hardware address, broadcast address, setting."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
SIOCGIFNETMASK = 0x891B
SIOCETHTOOL = 0x8946
ETHTOOL_GWOL = 0x5
WAKE_MAGIC = 1 << 5
_NET = Path("/sys/class/net")


def read_mac(device: str) -> str | None:
    """Return the hardware address of a network device; None: it has none, as a tunnel."""
    with contextlib.suppress(OSError):
        mac = (_NET / device / "address").read_text(encoding="ascii").strip().lower()
        if len(mac) == 17 and mac != "00:00:00:00:00:00":
            return mac
    return None


def read_broadcast(device: str) -> str | None:
    """Return the IPv4 broadcast address of a network device; None: it has no IPv4 network.

    It is computed: the one that the kernel keeps is empty for addresses that were set by hand.
    """
    address, mask = (_ask_ipv4(device, request) for request in (SIOCGIFADDR, SIOCGIFNETMASK))
    if address is None or mask is None:
        return None
    network = ipaddress.IPv4Interface(f"{address}/{mask}").network
    return str(network.broadcast_address) if network.prefixlen < 31 else None


def _ask_ipv4(device: str, request: int) -> str | None:
    question = struct.pack("256s", os.fsencode(device)[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker.fileno(), request, question)
        # struct ifreq: 16 bytes of name, then a sockaddr_in whose address begins at byte 4.
        return socket.inet_ntoa(answer[20:24])
    return None


def read_wakes(device: str) -> bool | None:
    """Return whether a magic packet wakes this PC; None: it does not say.

    The card itself answers root alone. For others, the kernel tells whether the device may wake the
    PC at all, which the same setting turns on.
    """
    asked = _ask_card(device)
    if asked is not None:
        return asked
    with contextlib.suppress(OSError):
        state = (_NET / device / "device/power/wakeup").read_text(encoding="ascii").strip()
        return {"enabled": True, "disabled": False}.get(state)
    return None


def _ask_card(device: str) -> bool | None:
    # struct ethtool_wolinfo: command, what it supports, what is on, a password.
    info = array.array("B", struct.pack("III6s", ETHTOOL_GWOL, 0, 0, b"") + bytes(2))
    place, _ = info.buffer_info()
    # struct ifreq: 16 bytes of name, then a pointer to the structure.
    request = struct.pack("16sP", os.fsencode(device)[:15], place) + bytes(16)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        fcntl.ioctl(asker.fileno(), SIOCETHTOOL, request)
        _, supported, on = struct.unpack_from("III", info)
        return bool(on & WAKE_MAGIC) if supported else None
    return None

"""Read the hosts that this PC has talked to recently: its neighbour table (ARP).

Nothing is sent. Linux has /proc/net/arp; Windows and macOS print the table with `arp -a`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from agents.shared.files.python_child import SAFE_FOLDER, python_environ

TABLE = Path("/proc/net/arp")
ARP_TIMEOUT_S = 5.0
_COMPLETE = 0x2
_SIOCGIFADDR = 0x8915
# Addresses only: `arp -a` prints its other words in the language of the system.
_ROW = re.compile(
    r"\(?(\d+\.\d+\.\d+\.\d+)\)?\s+(?:at\s+)?((?:[0-9a-fA-F]{1,2}[:-]){5}[0-9a-fA-F]{1,2})"
)


@dataclass(frozen=True, slots=True)
class Neighbour:
    address: str
    mac: str
    """Hardware address as `aa:bb:cc:dd:ee:ff`."""
    interface: str = ""
    """Network device that leads to it; empty if unknown."""


def read_neighbours() -> tuple[Neighbour, ...]:
    """Return the hosts in the neighbour table; empty if this system has no such table."""
    if TABLE.exists():
        return parse_proc_arp(TABLE.read_text(encoding="ascii", errors="replace"))
    try:
        done = subprocess.run(
            ["arp", "-a"],
            capture_output=True,
            timeout=ARP_TIMEOUT_S,
            cwd=SAFE_FOLDER,
            env=python_environ(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_arp_command(done.stdout.decode("ascii", errors="replace"))


def parse_proc_arp(text: str) -> tuple[Neighbour, ...]:
    """Return the complete entries of /proc/net/arp."""
    found = []
    for line in text.splitlines()[1:]:
        parts = line.split()
        # Address, hardware type, flags, hardware address, mask, device.
        if len(parts) == 6 and int(parts[2], 16) & _COMPLETE and _is_host(parts[0], parts[3]):
            found.append(Neighbour(parts[0], parts[3].lower(), parts[5]))
    return tuple(found)


def parse_arp_command(text: str) -> tuple[Neighbour, ...]:
    """Return the hosts in the output of `arp -a`, in any language."""
    found = {}
    for address, mac in _ROW.findall(text):
        plain = ":".join(part.rjust(2, "0") for part in re.split("[:-]", mac.lower()))
        if _is_host(address, plain):
            found[address] = Neighbour(address, plain)
    return tuple(found.values())


def own_addresses() -> dict[str, str]:
    """Return this PC's IPv4 addresses and the network device of each; loopback is left out."""
    found: dict[str, str] = {}
    if sys.platform == "win32":
        for address in socket.gethostbyname_ex(socket.gethostname())[2]:
            found[address] = ""
    else:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)
                except OSError:  # it has no IPv4 address
                    continue
                # struct ifreq: 16 bytes of name, then a sockaddr_in: its address is at byte 4.
                found[socket.inet_ntoa(answer[20:24])] = name
    return {a: name for a, name in found.items() if not ipaddress.ip_address(a).is_loopback}


def _is_host(address: str, mac: str) -> bool:
    """Return True if an entry is one host, not a group, a broadcast or an unresolved address."""
    try:
        found = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    # The lowest bit of the first byte marks group addresses (IEEE 802).
    is_group = int(mac[:2], 16) & 1
    return not (found.is_multicast or is_group or mac == "00:00:00:00:00:00")

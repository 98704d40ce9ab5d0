"""State of Windows before it is prepared, and the settings that the node wants.

The script gathers the facts on the PC itself and plans from them as `plan.py` does. `-DryRun -Facts
FILE` lets it plan from a file of the same form instead.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

DEFAULT_SSH_PORT = 2222
"""Port of the SSH server inside WSL: Windows and WSL share one address, and 22 may be Windows'."""
RESERVED_PORTS = frozenset((1900, 2869, 3702, 5004, 5357, 5358))
"""Ports from 1024 on that Windows never gives to mirrored WSL (WSL networking documentation)."""
FIRST_DYNAMIC_PORT = 49152
MAX_MEMORY_GIB = 4096
_DISTRO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# One line without control characters, since the script writes it into authorized_keys.
_PUBLIC_KEY = re.compile(r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp\d{3}) [A-Za-z0-9+/=]+( [!-~ ]*)?")

Start = Literal["boot", "logon"]
"""Trigger of the task that keeps WSL running: the start of Windows, or its user's logon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsWanted:
    """Settings that a node in WSL wants from its Windows."""

    node: str
    """Name of the node; also names the record of changes on the PC."""
    distro: str
    """Name of the WSL distro."""
    peers: tuple[str, ...] = ()
    """Addresses of the other nodes of the cluster, which may connect to any TCP port."""
    masters: tuple[str, ...] = ()
    """Addresses of the PCs with the window, which may connect to the SSH port."""
    ssh_port: int = DEFAULT_SSH_PORT
    public_key: str = ""
    """Public key that may log in, as in a `.pub` file; empty to keep the existing ones."""
    memory_gib: int | None = None
    """Memory of WSL, in GiB; None for WSL's default, half of the PC's."""
    start: Start = "boot"
    has_ssh_agent: bool = False
    """True if this Windows is also a master, whose ssh-agent service should run."""

    def __post_init__(self) -> None:
        if not _DISTRO.fullmatch(self.distro):
            raise ValueError(
                f"distro is {self.distro!a}; it must be 1 to 64 letters, digits, dots, dashes and "
                "underscores, as wsl --list prints it"
            )
        for field, addresses in (("peers", self.peers), ("masters", self.masters)):
            for address in addresses:
                try:
                    ipaddress.ip_address(address)
                except ValueError:
                    raise ValueError(f"{field} has {address!a}, which is no IP address") from None
        if not 1024 <= self.ssh_port < FIRST_DYNAMIC_PORT or self.ssh_port in RESERVED_PORTS:
            raise ValueError(
                f"ssh_port is {self.ssh_port}; it must be from 1024 to {FIRST_DYNAMIC_PORT - 1} "
                f"and none of {', '.join(map(str, sorted(RESERVED_PORTS)))}, which are Windows'"
            )
        if self.public_key and not _PUBLIC_KEY.fullmatch(self.public_key):
            raise ValueError("public_key is not one line of a .pub file")
        if self.memory_gib is not None and not 1 <= self.memory_gib <= MAX_MEMORY_GIB:
            raise ValueError(
                f"memory_gib is {self.memory_gib}; it must be from 1 to {MAX_MEMORY_GIB}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Distro:
    name: str
    version: int
    """Version of WSL that it runs on, 1 or 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirewallRule:
    """A rule of the Hyper-V firewall that Rackless made."""

    name: str
    addresses: tuple[str, ...]
    ports: tuple[str, ...]
    """TCP ports that it opens; empty for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortRange:
    first: int
    last: int
    """Last port of the range, inclusive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartTask:
    """The task that keeps WSL running."""

    start: str
    """`boot`, `logon`, or the name of another trigger."""
    execute: str
    arguments: str
    time_limit: str
    """Time after which it is ended, as an ISO 8601 duration; `PT0S` for never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsFacts:
    """Current state of Windows; None for what could not be read or does not exist."""

    windows_build: int
    wsl_version: str | None
    """Version such as `2.4.13.0`; None without WSL, or with only the one that came with Windows."""
    wsl_path: str
    """Path of `wsl.exe`."""
    distros: tuple[Distro, ...] = ()
    wslconfig: str | None = None
    """Text of `.wslconfig`; None if the file is missing."""
    has_hyperv_firewall: bool = False
    rules: tuple[FirewallRule, ...] | None = ()
    """Rules of Rackless; None if only an administrator can read them."""
    task: StartTask | None = None
    standby_s: int | None = None
    """Time until Windows sleeps on mains power, in seconds; 0 for never."""
    hibernate_s: int | None = None
    """Time until Windows hibernates on mains power, in seconds; 0 for never."""
    ssh_agent: str | None = None
    """State of the ssh-agent service, such as `Disabled, Stopped`; None if it is missing."""
    excluded_ports: tuple[PortRange, ...] = ()
    """TCP ports that Windows has reserved."""
    dynamic_ports: PortRange | None = None
    """TCP ports for programs that request any free port."""
    sshd_lacks: tuple[str, ...] | None = None
    """Missing parts of the distro's SSH server; None if the distro does not answer."""

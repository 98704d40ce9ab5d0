"""A PC that could become a node, with its properties that need no login."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

Source = Literal["ssh-config", "mdns", "neighbour"]
PortState = Literal["open", "closed", "not-tried"]
_TAILSCALE = ipaddress.ip_network("100.64.0.0/10")
_TAILSCALE_V6 = ipaddress.ip_network("fd7a:115c:a1e0::/48")
_OVERLAYS = (("tailscale", "Tailscale"), ("wg", "WireGuard"), ("zt", "ZeroTier"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PcCandidate:
    target: str
    """Argument for `--ssh`: a name of ~/.ssh/config, or a host, with its port if it is not 22. The
    user name may be missing."""
    host: str
    """Address or host name; empty if not resolved, as for a host behind a jump host."""
    port: int
    name: str = ""
    """Name from the PC or the configuration; empty if unknown."""
    sources: tuple[Source, ...]
    state: PortState
    """State of the SSH port; `not-tried` behind another host."""
    banner: str = ""
    """First line of the SSH server, such as `SSH-2.0-OpenSSH_9.6p1 Ubuntu-3`."""
    overlay: str = ""
    """Name of the virtual network that leads to it, such as Tailscale; empty if there is none."""
    node: str = ""
    """Name of the node that it already is, or empty."""


def name_overlay(address: str, interface: str = "") -> str:
    """Return the name of the virtual network that an address or interface belongs to, or "".

    >>> name_overlay("100.101.2.3"), name_overlay("10.8.0.2", "wg0"), name_overlay("10.0.0.2")
    ('Tailscale', 'WireGuard', '')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        found = None
    # Carrier-grade NAT has these addresses, too, but never between PCs of one home.
    if found is not None and (found in _TAILSCALE or found in _TAILSCALE_V6):
        return "Tailscale"
    for prefix, name in _OVERLAYS:
        if interface.lower().startswith(prefix):
            return name
    return ""


def warn_of_overlay(overlay: str) -> str:
    """Return the sentence that warns of training over a virtual network."""
    return (
        f"It is reached over {overlay}. That is good for control, but gradients over it are slow: "
        "join the PCs by a cable and use their addresses there."
    )

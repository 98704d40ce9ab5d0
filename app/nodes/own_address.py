"""Find this PC's address on the route to another PC."""

from __future__ import annotations

import contextlib
import socket

# Documentation address (RFC 5737): routed like any address of the internet, but no host has it.
ANYWHERE = "192.0.2.1"


def own_address_toward(target: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str | None:
    """Return this PC's address on the route to `target`, or None without one; sends nothing.

    Args:
        target: name or address.
        family: family of usable addresses.
    """
    with contextlib.suppress(OSError, UnicodeError):
        found, *_, place = socket.getaddrinfo(target, 9, family, socket.SOCK_DGRAM)[0]
        with socket.socket(found, socket.SOCK_DGRAM) as asker:
            asker.connect(place)  # UDP: only chooses our address, sends nothing
            return str(asker.getsockname()[0]).partition("%")[0]
    return None

"""Let connections between ranks go on soon after an outage of the network.

Linux doubles its pause before each further try to send, so a connection stands still for as long
again as the network was away. Newer kernels (6.15) can be given a maximum. They count the tries
until a connection is given up, so a time for that has to be set first.
"""

from __future__ import annotations

import contextlib
import socket

from agents.rendezvous.own_sockets import copy_sockets

GIVEN_UP_AFTER_S = 1800.0
"""Time without any answer after which the kernel gives a connection up, in seconds; the supervisor
ends the ranks long before."""
RETRY_S = 1.0
"""Maximum pause between two tries to send, in seconds; the least that the kernel takes."""
_TCP_RTO_MAX_MS = 44


def outlast_outages() -> int:
    """Set this for all connections of this process; return how many the kernel can do it for."""
    num_set = 0
    for connection in copy_sockets(listening=False):
        with connection, contextlib.suppress(OSError):  # an older kernel, or it was closed
            given_up_ms = int(GIVEN_UP_AFTER_S * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, given_up_ms)
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, int(RETRY_S * 1000))
            num_set += 1
    return num_set

"""Make connections between ranks resume quickly after a network outage.

Linux doubles its retransmission timeout with each try, so a connection may stay idle for as long
again as the outage lasted. Linux 6.15 and later accept a maximum (`TCP_RTO_MAX_MS`).
"""

from __future__ import annotations

import contextlib
import socket

from agents.rendezvous.own_sockets import copy_sockets

GIVEN_UP_AFTER_S = 1800.0
"""Time without an acknowledgement after which the kernel closes a connection, in seconds; the
supervisor ends the ranks long before."""
RETRY_S = 1.0
"""Maximum retransmission timeout, in seconds; the minimum that the kernel accepts."""
_TCP_RTO_MAX_MS = 44


def outlast_outages() -> int:
    """Set the maximum for all connections of this process; return how many accepted it."""
    num_set = 0
    for connection in copy_sockets(listening=False):
        with connection, contextlib.suppress(OSError):  # an older kernel, or a closed connection
            # First, because the kernel gives up after a number of tries, which come faster now.
            given_up_ms = int(GIVEN_UP_AFTER_S * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, given_up_ms)
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, int(RETRY_S * 1000))
            num_set += 1
    return num_set

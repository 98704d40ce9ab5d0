"""Close the doors of Gloo, which keeps listening after all of its connections exist.

It takes whoever connects and asks nothing. The kernel can drop what comes to a listening socket,
by a filter on it, while the connections that came from it stay as they are. Shutting the socket
down instead would wake Gloo's own thread without end.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct

from agents.rendezvous.own_sockets import copy_sockets

_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # BPF_RET | BPF_K: keep that many bytes of the packet, here none


def close_doors() -> int:
    """Let nobody connect to the TCP sockets on which this process listens; return their number."""
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
    drop_all = struct.pack("@HP", 1, ctypes.addressof(program))
    listening = copy_sockets(listening=True)
    for door in listening:
        with door, contextlib.suppress(OSError):  # a sandbox may have no filters
            door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, drop_all)
    return len(listening)

"""Close the doors of Gloo, which keeps listening after all of its connections exist.

It takes whoever connects and asks nothing. The kernel can drop what comes to a listening socket,
by a filter on it, while the connections that came from it stay as they are. Shutting the socket
down instead would wake Gloo's own thread without end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct

_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # BPF_RET | BPF_K: keep that many bytes of the packet, here none


def close_doors() -> int:
    """Let nobody connect to the TCP sockets on which this process listens; return their number."""
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
    drop_all = struct.pack("@HP", 1, ctypes.addressof(program))
    listening = _listening_sockets()
    for door in listening:
        with door, contextlib.suppress(OSError):  # a sandbox may have no filters
            door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, drop_all)
    return len(listening)


def _listening_sockets() -> list[socket.socket]:
    """Return copies of the TCP sockets on which this process listens."""
    found = []
    # Listed before anything is copied, or copies would be found as well.
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd") if _is_socket(int(name))]:
        with contextlib.suppress(OSError):  # another thread closed it
            copy = socket.socket(fileno=os.dup(descriptor))
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and copy.family in (socket.AF_INET, socket.AF_INET6):
                found.append(copy)
            else:
                copy.close()
    return found


def _is_socket(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return False

"""Close the listening sockets of Gloo, which stay open after all connections exist.

Gloo accepts any caller without authentication. A socket filter lets the kernel drop all packets to
a listening socket; accepted connections are not affected. Shutting down the socket instead would
make Gloo's accept thread spin.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct

from agents.rendezvous.own_sockets import copy_sockets

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_RETURN = 0x06  # BPF_RET | BPF_K: accept a constant number of bytes of the packet, here 0


def close_doors() -> int:
    """Drop packets to all listening TCP sockets of this process; return their number."""
    # struct sock_filter (code, jt, jf, k) and struct sock_fprog (length, pointer)
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
    drop_all = struct.pack("@HP", 1, ctypes.addressof(program))
    listening = copy_sockets(listening=True)
    for door in listening:
        with door, contextlib.suppress(OSError):  # a sandbox may not support filters
            door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, drop_all)
    return len(listening)

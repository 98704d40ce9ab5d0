"""Find the TCP sockets of this process, including those that a library opened."""

from __future__ import annotations

import contextlib
import os
import socket
import stat


def copy_sockets(*, listening: bool) -> list[socket.socket]:
    """Return duplicates of all TCP sockets that listen, or that do not; the caller closes them."""
    found = []
    # The list is complete before the first duplicate exists, which would be listed as well.
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd") if _is_socket(int(name))]:
        with contextlib.suppress(OSError):  # another thread has closed it
            copy = socket.socket(fileno=os.dup(descriptor))
            is_tcp = copy.type == socket.SOCK_STREAM and copy.family in (
                socket.AF_INET,
                socket.AF_INET6,
            )
            listens = is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
            if is_tcp and listens == listening:
                found.append(copy)
            else:
                copy.close()
    return found


def _is_socket(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return False

"""Start the process of the store from rank 0, on a socket that is bound here."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import subprocess
import sys

from agents.errors import ExpectedError
from agents.rendezvous.interfaces import bind_to
from agents.shared.files.python_child import SAFE_FOLDER
from agents.state import archive_path

_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from agents.rendezvous.server import main
main(int(sys.argv[2]))
"""
_END_TIMEOUT_S = 5.0


class StoreHost:
    """The running process; it ends with `close`, and with the process that started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, which nothing but `close` should bring about."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process; whoever still waits for a key loses the connection."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens there, and nowhere else.

    Raises:
        ExpectedError: the port is taken, or the address is not one of this node's.
    """
    try:
        return bind_to(address, port, backlog=256)
    except OSError as error:
        where = f"Rank 0 cannot listen on {address} port {port}"
        if error.errno == errno.EADDRINUSE:
            raise ExpectedError(
                f"{where}: another program uses that port.",
                "Start or resume the run again: another port is chosen each time",
            ) from error
        raise ExpectedError(
            f"{where}: {error.strerror or error}.",
            "Compare it with the node's addresses: rackless nodes show NAME",
        ) from error


def start_store(address: str, port: int, credential: str) -> StoreHost:
    """Start the store of an attempt on this node.

    Raises:
        ExpectedError: it cannot listen at that address and port.
    """
    with listen_at(address, port) as listener:
        # -I, -S: neither the current folder nor variables nor packages decide what is imported.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, archive_path(), str(listener.fileno())],
            cwd=SAFE_FOLDER,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    assert process.stdin is not None
    # On stdin: the arguments and variables of a process can be read by others.
    with contextlib.suppress(BrokenPipeError):  # it could not start, which `has_ended` says
        process.stdin.write(json.dumps({"credential": credential}).encode("ascii") + b"\n")
        process.stdin.flush()
    return StoreHost(process)

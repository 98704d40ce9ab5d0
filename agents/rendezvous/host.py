"""Start the store's process from rank 0, on a socket that rank 0 has bound."""

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
    """The running process of a store; it ends with `close` or with its parent."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def has_ended(self) -> bool:
        """True if the process has ended; only `close` should cause that."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process; clients that still wait for a key lose their connection."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()  # the process exits at the end of its stdin
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at this address only.

    Raises:
        ExpectedError: the port is taken, or the address does not belong to this node.
    """
    try:
        return bind_to(address, port, backlog=256)
    except OSError as error:
        where = f"Rank 0 cannot listen on {address} port {port}"
        if error.errno == errno.EADDRINUSE:
            raise ExpectedError(
                f"{where}: another program uses that port.",
                "Start or resume the run again; each start chooses another port",
            ) from error
        raise ExpectedError(
            f"{where}: {error.strerror or error}.",
            "Compare the address with those of the node: rackless nodes show NAME",
        ) from error


def start_store(address: str, port: int, credential: str) -> StoreHost:
    """Start the store of an attempt on this node.

    Raises:
        ExpectedError: it cannot listen at this address and port.
    """
    with listen_at(address, port) as listener:
        # -I, -S: imports must not depend on the current folder, variables or installed packages.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, archive_path(), str(listener.fileno())],
            cwd=SAFE_FOLDER,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    assert process.stdin is not None
    # On stdin, because other users can read the arguments of a process.
    with contextlib.suppress(BrokenPipeError):  # it failed to start: see `has_ended`
        process.stdin.write(json.dumps({"credential": credential}).encode("ascii") + b"\n")
        process.stdin.flush()
    return StoreHost(process)

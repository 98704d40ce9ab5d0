"""Chunks from this PC to a node's port, over TLS and past SSH.

SSH in Python costs three times the CPU time of TLS, which OpenSSL does without the interpreter:
5.5 s per GiB here beside 1.9 s, and 4.9 s on the node beside 3.3 s (tests/bench/bench_spread.py).
On a fast network that, and not the cable, would be the limit. Writing runs in a thread; a task that
is cancelled shuts the connection, which wakes the thread.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from agents.contract.spread import CHUNK_FRAME, OFFER
from app.nodes.credential import make_client_context
from app.nodes.files.local_files import in_stoppable_thread, in_thread

CONNECT_TIMEOUT_S = 1.5
"""Time to open the port, in seconds: the SSH connection to the same PC took milliseconds, and a
firewall that drops packets is only noticed by the time that passes."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Time for the handshake, and for the answer to the offer, in seconds."""
STALL_S = 20.0
"""Time for a node to take a block, in seconds; SSH is more patient with slow disks."""
BLOCK_BYTES = 256 << 10
"""Size of the blocks that are encrypted and sent at a time, in bytes."""
T = TypeVar("T")


class DirectFeed:
    """An open connection to the port of a node that takes chunks."""

    def __init__(self, channel: ssl.SSLSocket) -> None:
        self._channel = channel

    @classmethod
    async def open(cls, address: str, port: int, credential: str) -> DirectFeed:
        """Connect, and have the node take chunks from now on.

        Args:
            address: of the node, in numbers.
            port: where it listens for this transfer.
            credential: of this transfer.

        Raises:
            OSError: nothing listens there, a firewall is in between, or it is not the node.
        """
        context = await in_thread(make_client_context, credential)
        plain = await in_thread(socket.create_connection, (address, port), CONNECT_TIMEOUT_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = context.wrap_socket(plain, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        feed = cls(channel)
        try:
            await feed._do(feed._offer)
        except BaseException:
            feed.close()
            raise
        return feed

    async def send(self, number: int, data: bytes) -> None:
        """Send a chunk.

        Raises:
            OSError: the connection broke, or the node takes nothing.
        """
        await self._do(lambda: self._send(number, data))

    async def wait_taken(self) -> None:
        """Wait until the node closes its end, which it does once it lacks nothing.

        Raises:
            OSError: the connection broke, or the node takes too long.
        """
        await self._do(lambda: self._channel.recv(1))

    def close(self) -> None:
        self._channel.close()

    def _offer(self) -> None:
        self._channel.settimeout(HANDSHAKE_TIMEOUT_S)
        self._channel.do_handshake()
        self._channel.sendall(json.dumps({"kind": OFFER}).encode("ascii") + b"\n")
        # The answer comes whole or not at all: what is no answer is not one of ours.
        if self._channel.recv(16) != b"{}\n":
            raise ConnectionAbortedError("it refuses")
        self._channel.settimeout(STALL_S)

    def _send(self, number: int, data: bytes) -> None:
        self._channel.sendall(CHUNK_FRAME.pack(number, len(data)))
        left = memoryview(data)
        while left:
            self._channel.sendall(left[:BLOCK_BYTES])
            left = left[BLOCK_BYTES:]

    async def _do(self, work: Callable[[], T]) -> T:
        return await in_stoppable_thread(work, self._shut)

    def _shut(self) -> None:
        # Not the method of SSLSocket, which first turns the socket into one without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._channel, socket.SHUT_RDWR)

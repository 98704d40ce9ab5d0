"""Send one node the chunks that it lacks from this PC: to its port if reachable, else through SSH.

A problem with the port only costs time: the node reports its chunks, and the rest goes through SSH.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar

from agents.contract.chunks import ChunkedFile, from_bitmap, list_chunks
from agents.contract.spread import CHUNK_FRAME, OFFER, ChunkHeader
from app.nodes.credential import make_client_context
from app.nodes.files.chunk_readers import ChunkReader, read_ahead
from app.nodes.files.local_files import in_stoppable_thread, in_thread
from app.nodes.files.spread_state import TargetState

CONNECT_TIMEOUT_S = 1.5
"""Maximum time to open the port, in seconds. The SSH connection to the same PC took milliseconds; a
firewall that drops packets shows itself only by this timeout."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum time for the handshake, and for the answer to the offer, in seconds."""
STALL_S = 20.0
"""Maximum time for a node to take a block, in seconds; SSH is more patient with slow disks."""
BLOCK_BYTES = 256 << 10
"""Size of the blocks that are encrypted and sent at a time, in bytes."""
T = TypeVar("T")


class DirectFeed:
    """An open TLS connection to the port of a node that receives chunks.

    SSH in Python costs three times the CPU time of TLS, which OpenSSL does without the interpreter:
    5.5 s per GiB here against 1.9 s, and 4.9 s on the node against 3.3 s, measured by
    tests/bench/bench_spread.py. On a fast network that, and not the cable, would be the limit.
    """

    def __init__(self, channel: ssl.SSLSocket) -> None:
        self._channel = channel

    @classmethod
    async def open(cls, address: str, port: int, credential: str) -> DirectFeed:
        """Connect, and start the transfer of chunks.

        Args:
            address: IP address of the node.
            port: port on which the node listens for this transfer.
            credential: credential of this transfer.

        Raises:
            OSError: nothing listens there, a firewall is in between, or it is not the node.
        """
        context = await in_thread(make_client_context, credential)
        plain = await in_thread(socket.create_connection, (address, port), CONNECT_TIMEOUT_S)
        try:
            # The end of a chunk must not wait for the acknowledgement of earlier packets.
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
        # Our agent answers with one short line; anything else is not our agent.
        if self._channel.recv(16) != b"{}\n":
            raise ConnectionAbortedError("it refuses")
        self._channel.settimeout(STALL_S)

    def _send(self, number: int, data: bytes) -> None:
        self._channel.sendall(CHUNK_FRAME.pack(number, len(data)))
        left = memoryview(data)
        while left:
            self._channel.sendall(left[:BLOCK_BYTES])
            left = left[BLOCK_BYTES:]

    # Writing blocks in a thread; a task that is cancelled shuts the connection, which wakes the
    # thread.
    async def _do(self, work: Callable[[], T]) -> T:
        return await in_stoppable_thread(work, self._shut)

    def _shut(self) -> None:
        # Not SSLSocket.shutdown, which first turns the socket into one without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._channel, socket.SHUT_RDWR)


# ------------------------------------------------------------------------

_log = logging.getLogger(__name__)


async def feed(
    state: TargetState, chunks: ChunkReader, files: Sequence[ChunkedFile], credential: str
) -> None:
    """Send a node the chunks of `files` that it does not hold.

    Returns early if the connection to its port breaks: the node then reports its chunks.

    Raises:
        UserError: a chunk cannot be read.
        NodeUnreachable: the SSH connection broke, or the node that has the files was lost.
        BrokenPipeError: the node's command has ended, and `Member.hear` raises the reason.
    """
    held = from_bitmap(state.held)
    missing = [number for number in range(len(list_chunks(files))) if number not in held]
    if state.may_be_direct:
        state.may_be_direct = False
        channel = await _open_port(state, credential)
        if channel is not None:
            state.is_direct = True
            await _feed_directly(state, chunks, missing, channel)
            return
    async with contextlib.aclosing(read_ahead(chunks, missing)) as found:
        async for number, data in found:
            await state.member.say(ChunkHeader(chunk=number, size_bytes=len(data)), data)


async def _open_port(state: TargetState, credential: str) -> DirectFeed | None:
    member = state.member
    # Behind a jump host, a program or a forwarded port, the address would be that of another PC.
    if not member.has_own_address:
        return None
    try:
        return await DirectFeed.open(member.address, member.port, credential)
    except OSError as error:
        _log.info(
            "%s gets its files through SSH, which costs CPU time: port %d of %s cannot be reached "
            "from this PC (%s). A firewall that lets this PC reach it would make it faster.",
            *(member.name, member.port, member.address, error or "it does not answer"),
        )
        return None


async def _feed_directly(
    state: TargetState, chunks: ChunkReader, missing: Sequence[int], channel: DirectFeed
) -> None:
    try:
        async with contextlib.aclosing(read_ahead(chunks, missing)) as found:
            async for number, data in found:
                await channel.send(number, data)
        await channel.wait_taken()
    except OSError as error:
        _log.info("the connection to a port of %s broke: %s", state.member.name, error)
    finally:
        channel.close()

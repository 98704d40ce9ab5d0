"""Chunks between nodes: who has them listens, who lacks them connects and says which.

A frame is a chunk's number and size, then its bytes. While nothing can be sent yet, an empty frame
goes out every BEAT_S, so that the other side can tell a node that waits from one that is gone. At
the same port the master brings chunks itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from agents.contract.spread import CHUNK_FRAME, OFFER
from agents.contract.wire import WireError
from agents.election.channel import Listener, Peer, PeerError
from agents.spread.holdings import Holdings

BEAT_S = 0.25
"""Time between two frames, in seconds."""
SILENCE_S = 3.0
"""Time without a byte after which a node counts as gone, in seconds. One that was only busy goes on
where it was, and the others may return to it."""
BLOCK_BYTES = 512 << 10
"""Size of the blocks that are hashed and written while more arrive, in bytes."""
REQUEST = "chunks"
_BEAT = CHUNK_FRAME.pack(0, 0)


def listen(
    address: str, credential: str, holdings: Holdings, take: Callable[[BinaryIO], None]
) -> Listener:
    """Serve chunks on a free port of `address` to whoever has the credential.

    Args:
        address: of this PC.
        credential: of the transfer.
        holdings: what is served.
        take: reads the frames that the master brings.

    Raises:
        OSError: the address is not one of this PC's, or means several.
    """

    def answer(request: dict[str, Any], stream: BinaryIO) -> None:
        if request.get("kind") == OFFER:
            stream.write(b"{}\n")
            stream.flush()
            take(stream)
            return
        wanted = request.get("wanted")
        if request.get("kind") != REQUEST or not isinstance(wanted, str):
            raise WireError("this port gives chunks")
        try:
            supply = holdings.supply(wanted, BEAT_S)
            stream.write(b"{}\n")
            for found in supply:
                if found is None:
                    stream.write(_BEAT)
                else:
                    number, data = found
                    stream.write(CHUNK_FRAME.pack(number, len(data)))
                    stream.write(data)
                stream.flush()
        except ValueError as error:
            raise WireError(str(error)) from error

    return Listener(address, 0, credential, answer)


def fetch(
    peer: Peer, holdings: Holdings, pool: ThreadPoolExecutor, is_over: Callable[[], bool]
) -> None:
    """Fetch what is missing from another node until nothing is, or `is_over` between two chunks.

    Raises:
        PeerError: it cannot be reached, is silent, or sends what it was not asked for.
        DamagedChunk: it sends other bytes.
        ExpectedError: our disk refuses.
    """
    try:
        with peer.receive(REQUEST, SILENCE_S, wanted=holdings.wanted()) as stream:
            receive_frames(stream, holdings, pool, is_over)
    except EOFError as error:
        raise PeerError(f"{peer.node} has closed the connection") from error


def receive_frames(
    stream: BinaryIO, holdings: Holdings, pool: ThreadPoolExecutor, is_over: Callable[[], bool]
) -> None:
    """Receive chunks until none is missing, or `is_over` between two of them.

    Raises:
        EOFError: the stream ends before; else what `receive_chunk` raises.
    """
    frame = bytearray(CHUNK_FRAME.size)
    while not holdings.is_complete() and not is_over():
        fill(stream, memoryview(frame))
        number, size_bytes = CHUNK_FRAME.unpack(frame)
        if size_bytes:
            receive_chunk(holdings, number, size_bytes, stream, pool)


def receive_chunk(
    holdings: Holdings, number: int, size_bytes: int, stream: BinaryIO, pool: ThreadPoolExecutor
) -> None:
    """Read, verify and add one chunk.

    Raises:
        PeerError: it breaks off, or is no chunk of this transfer.
        DamagedChunk: it has other bytes.
        ExpectedError: our disk refuses.
        OSError: the stream breaks.
        EOFError: it ends.
    """
    if number >= len(holdings.chunks) or holdings.chunks[number].size_bytes != size_bytes:
        raise PeerError(f"chunk {number} with {size_bytes} bytes is not part of this transfer")
    writer = holdings.writing(number, pool)
    try:
        left = size_bytes
        while left:
            block = memoryview(bytearray(min(left, BLOCK_BYTES)))
            fill(stream, block)
            left -= len(block)
            writer.write(block)
        writer.finish()
    finally:
        writer.close()


def fill(stream: BinaryIO, block: memoryview) -> None:
    """Read exactly as many bytes as the block has.

    Raises:
        EOFError: the stream ends before.
    """
    while block:
        done = stream.readinto(block)  # type: ignore[attr-defined]
        if not done:
            raise EOFError("the other side has closed it")
        block = block[done:]

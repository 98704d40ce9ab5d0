"""Exchange of chunks between nodes: holders listen; a receiver connects and requests chunks.

A frame is a chunk's number and size, then its bytes. A sender with no chunk to send yet sends an
empty frame every `BEAT_S`, so that the receiver can tell a waiting node from a lost one. The master
delivers chunks at the same port.
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
"""Time between two empty frames, in seconds."""
SILENCE_S = 3.0
"""Time without a byte after which a node counts as lost, in seconds. A node that was only busy
continues its own transfer, and the master may direct others to it again."""
BLOCK_BYTES = 512 << 10
"""Size of the blocks that are hashed and written while more arrive, in bytes."""
REQUEST = "chunks"
_BEAT = CHUNK_FRAME.pack(0, 0)


def listen(
    address: str, credential: str, holdings: Holdings, take: Callable[[BinaryIO], None]
) -> Listener:
    """Serve chunks on a free port of `address` to callers with the credential.

    Args:
        address: address of this PC.
        credential: credential of the transfer.
        holdings: chunks to serve.
        take: receives the frames that the master delivers.

    Raises:
        OSError: the address belongs to another PC or means several interfaces.
    """

    def answer(request: dict[str, Any], stream: BinaryIO) -> None:
        if request.get("kind") == OFFER:
            stream.write(b"{}\n")
            stream.flush()
            take(stream)
            return
        wanted = request.get("wanted")
        if request.get("kind") != REQUEST or not isinstance(wanted, str):
            raise WireError("this port serves chunks only")
        try:
            supply = holdings.supply(wanted, BEAT_S)
            stream.write(b"{}\n")  # an empty answer: the frames follow
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
    """Fetch missing chunks from another node until all are present or `is_over` returns True.

    Raises:
        PeerError: the node is unreachable or silent, or sends a chunk that was not requested.
        DamagedChunk: a chunk does not match its hash.
        ExpectedError: this node's disk refuses.
    """
    try:
        with peer.receive(REQUEST, SILENCE_S, wanted=holdings.wanted()) as stream:
            receive_frames(stream, holdings, pool, is_over)
    except EOFError as error:
        raise PeerError(f"{peer.node} has closed the connection") from error


def receive_frames(
    stream: BinaryIO, holdings: Holdings, pool: ThreadPoolExecutor, is_over: Callable[[], bool]
) -> None:
    """Receive chunks until all are present, or `is_over` returns True between two chunks.

    Raises:
        EOFError: the stream ends before; also the errors of `receive_chunk`.
    """
    frame = bytearray(CHUNK_FRAME.size)
    while not holdings.is_complete() and not is_over():
        fill(stream, memoryview(frame))
        number, size_bytes = CHUNK_FRAME.unpack(frame)
        if size_bytes:  # an empty frame only shows that the sender is alive
            receive_chunk(holdings, number, size_bytes, stream, pool)


def receive_chunk(
    holdings: Holdings, number: int, size_bytes: int, stream: BinaryIO, pool: ThreadPoolExecutor
) -> None:
    """Read, verify and add one chunk.

    Raises:
        PeerError: the chunk is not part of this transfer.
        DamagedChunk: it does not match its hash.
        ExpectedError: this node's disk refuses.
        OSError: the stream fails.
        EOFError: the stream ends.
    """
    # Checked before reading, so that a malicious node cannot make this one read any amount.
    if number >= len(holdings.chunks) or holdings.chunks[number].size_bytes != size_bytes:
        raise PeerError(f"chunk {number} with {size_bytes} bytes is not part of this transfer")
    writer = holdings.writing(number, pool)
    try:
        left = size_bytes
        while left:
            # A new buffer for each block, because the writer still holds the last ones.
            block = memoryview(bytearray(min(left, BLOCK_BYTES)))
            fill(stream, block)
            left -= len(block)
            writer.write(block)
        writer.finish()
    finally:
        writer.close()


def fill(stream: BinaryIO, block: memoryview) -> None:
    """Fill the block from the stream.

    Raises:
        EOFError: the stream ends before.
    """
    while block:
        done = stream.readinto(block)  # type: ignore[attr-defined]
        if not done:
            raise EOFError("the other side has closed the stream")
        block = block[done:]

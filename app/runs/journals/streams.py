"""Fetch logs and journals from the nodes into the mirrors, once or continuously."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from agents.contract.messages import STREAM_CHUNK_BYTES
from agents.contract.requests.streams import ListStreams, ReadStream
from agents.contract.run import StreamChunk
from agents.contract.wire import WireError
from app.errors import BadAnswer, RacklessError
from app.runs.journals.mirror import Mirror, MirrorGap, StreamRefused
from app.runs.nodes.node_pool import NodeAgent, NodePool

# Time for another process to write its bytes before they are requested again.
_GAP_PAUSE_S = 0.05
Written = Callable[[str, int, bytes], None]
"""Callback with a stream, an offset and the bytes there, which may have been mirrored before."""


def store_chunk(mirror: Mirror, chunk: StreamChunk, written: Written | None = None) -> int:
    """Append the new bytes of a chunk; return their number.

    All of its bytes are reported, since another process that watches the run may have stored them:
    the mirror grows for both, but each learns of it only here.

    Raises:
        MirrorGap: bytes before the chunk are missing.
        BadAnswer: its data is not base64, or lies beyond the end of the stream.
        StreamRefused: no run has such a stream.
    """
    try:
        data = chunk.data()
    except WireError as error:
        raise BadAnswer(str(error), "Nothing of it was used") from error
    num_new = mirror.append(chunk.stream, chunk.offset, data, chunk.dropped_bytes)
    if data and written is not None:
        written(chunk.stream, chunk.offset, data)
    return num_new


async def sync_part(
    agent: NodeAgent, mirror: Mirror, run_id: str, attempt: int, written: Written | None = None
) -> None:
    """Fetch the bytes of the node's streams that the mirror lacks.

    Raises:
        UserError: the node refuses.
        NodeUnreachable: the connection was lost.
    """
    sizes = (await agent.ask(ListStreams(run_id=run_id, attempt=attempt))).streams
    here = mirror.sizes()

    async def fetch(stream: str, offset: int, size: int) -> None:
        while offset < size:
            chunk = await agent.ask(
                ReadStream(
                    run_id=run_id,
                    attempt=attempt,
                    stream=stream,
                    offset=offset,
                    max_bytes=STREAM_CHUNK_BYTES,
                )
            )
            # The size read below shows if another process has appended meanwhile.
            with contextlib.suppress(MirrorGap):
                store_chunk(mirror, chunk, written)
            reached = mirror.sizes().get(stream, 0)
            if reached <= offset:
                return  # the file has shrunk since it was listed
            offset = reached

    for stream, size in sizes.items():
        try:
            await fetch(stream, here.get(stream, 0), size)
        except StreamRefused as error:
            mirror.refuse(stream, error)


async def sync_parts(
    pool: NodePool, mirrors: dict[str, Mirror], run_id: str, attempt: int
) -> dict[str, RacklessError]:
    """Fetch from all nodes at once; return the errors by node."""
    names = tuple(mirrors)
    answers = await asyncio.gather(
        *(_sync_quietly(pool, node, mirrors[node], run_id, attempt) for node in names)
    )
    return {n: error for n, error in zip(names, answers, strict=True) if error is not None}


async def _sync_quietly(
    pool: NodePool, node: str, mirror: Mirror, run_id: str, attempt: int
) -> RacklessError | None:
    try:
        await sync_part(pool.agent(node), mirror, run_id, attempt)
    except RacklessError as error:
        return error
    return None


async def follow_part(
    agent: NodeAgent, mirror: Mirror, run_id: str, attempt: int, written: Written
) -> None:
    """Mirror the node's streams as they grow, until cancelled.

    Raises:
        NodeUnreachable: the connection was lost; received data is kept.
    """
    while True:
        try:
            await _store_all(agent.follow_streams(run_id, attempt, mirror.sizes()), mirror, written)
        except MirrorGap:
            # Another process is writing the bytes in between: request again from the current end.
            await asyncio.sleep(_GAP_PAUSE_S)


async def _store_all(chunks: AsyncIterator[StreamChunk], mirror: Mirror, written: Written) -> None:
    try:
        async for chunk in chunks:
            try:
                store_chunk(mirror, chunk, written)
            except StreamRefused as error:
                mirror.refuse(chunk.stream, error)
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()  # tells the node to stop sending

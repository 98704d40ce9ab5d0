"""Send one node from this PC the chunks that it lacks: to its port where that can be reached, else
through SSH.

A port is only tried where the node itself has the address that our SSH connection leads to. Behind
a jump host, a program or a forwarded port the address would be somebody else's, or nobody's. What
goes wrong there only costs time: the node says what it has, and the rest goes through SSH.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from agents.contract.chunks import ChunkedFile, from_bitmap, list_chunks
from agents.contract.spread import ChunkHeader
from app.nodes.files.chunk_readers import ChunkReader, read_ahead
from app.nodes.files.direct_feed import DirectFeed
from app.nodes.files.spread_state import TargetState

_log = logging.getLogger(__name__)


async def feed(
    state: TargetState, chunks: ChunkReader, files: Sequence[ChunkedFile], credential: str
) -> None:
    """Send a node the chunks of `files` that it does not hold.

    Returns early if the connection to its port breaks: the node says what it has then.

    Raises:
        UserError: a chunk cannot be read.
        NodeUnreachable: the SSH connection broke, or the node that has the files was lost.
        BrokenPipeError: the node's command has ended, for a reason that `Member.hear` raises.
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

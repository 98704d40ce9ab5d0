"""Read the chunks that this PC sends: from its own files, or from the node that has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agents.contract.chunks import ChunkedFile, list_chunks
from agents.contract.spread import GiveChunk
from agents.shared.files.folder_files import open_regular
from app.errors import RacklessError, UserError
from app.nodes.files.local_files import in_thread
from app.nodes.files.member import Member


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position of a file on this PC."""

    root: Path
    """Folder that links must not leave."""
    path: str
    """Path relative to `root`."""


class ChunkReader(Protocol):
    """Source of the chunks that this PC sends."""

    async def read(self, number: int) -> bytes: ...


class LocalChunks:
    """Reader of chunks of files on this PC."""

    def __init__(self, places: Sequence[Place], files: Sequence[ChunkedFile]) -> None:
        self._places = places
        self._chunks = list_chunks(files)

    async def read(self, number: int) -> bytes:
        """Return a chunk.

        Raises:
            UserError: the file cannot be read, or became shorter.
        """
        return await in_thread(self._read, number)

    def _read(self, number: int) -> bytes:
        chunk = self._chunks[number]
        place = self._places[chunk.file]
        path = place.root / place.path
        try:
            # Opened for each chunk: a file that is replaced by a link meanwhile must not be
            # followed.
            with open_regular(path, place.root) as file:
                file.seek(chunk.offset)
                data = file.read(chunk.size_bytes)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror or error}",
                "Check that it is still there and that you may read it",
            ) from error
        if len(data) != chunk.size_bytes:
            raise UserError(
                f"{path} became shorter while it was sent", "Leave the file alone and try again"
            )
        return data


class NodeChunks:
    """Reader of chunks from the node that has the files, for nodes that cannot reach it."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._asked: dict[int, asyncio.Future[bytes]] = {}

    async def read(self, number: int) -> bytes:
        """Return a chunk.

        Raises:
            UserError: the node cannot read it.
            NodeUnreachable: the node was lost.
        """
        # Several targets may need the same chunk: it is requested once, and all wait for one
        # future.
        if number not in self._asked:
            self._asked[number] = asyncio.get_running_loop().create_future()
            await self._member.say(GiveChunk(chunk=number))
        return await asyncio.shield(self._asked[number])

    def arrived(self, number: int, data: bytes) -> None:
        """Take a chunk that the node has sent."""
        asked = self._asked.pop(number, None)
        if asked is not None and not asked.done():
            asked.set_result(data)

    def fail(self, error: RacklessError) -> None:
        """Fail all waiting reads."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)


async def read_ahead(
    chunks: ChunkReader, numbers: Sequence[int]
) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield chunks, reading the next one while this one is sent."""
    ahead: asyncio.Task[bytes] | None = None
    try:
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            data = await (ahead or chunks.read(number))
            ahead = None if following is None else asyncio.create_task(chunks.read(following))
            yield number, data
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)

"""The `spread` command of one node, seen from the master, which trusts nothing that it sends."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from agents.contract.chunks import CHUNK_BYTES
from agents.contract.spread import (
    MAX_LINE_BYTES,
    ChunkHeader,
    Message,
    SpreadFailed,
    SpreadHello,
    read_line,
    to_line,
)
from agents.contract.wire import WireError
from app.errors import NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.nodes.files.remote_files import HEADER_TIMEOUT_S, STORE_TIMEOUT_S
from app.nodes.transport.process import Process
from app.text import one_line

_MAX_NOISE_BYTES = 256 << 10
# Maximum length of a node's error message and of its hint, in characters.
_MAX_SAID = 2000
HELLO_TIMEOUT_S = 60.0
"""Maximum time for a node to start its part, in seconds."""
T = TypeVar("T")


class Member:
    """One node of a transfer: its command, its address and port."""

    def __init__(self, client: NodeClient, process: Process) -> None:
        self.name = client.name
        self.address = ""
        self.port = 0
        self.heard_s = time.monotonic()
        self._process = process
        self._buffer = bytearray()
        self._writing = asyncio.Lock()

    @property
    def peer(self) -> str:
        """Address that our connection to the node leads to; empty if it leads to another host or
        program.
        """
        return self._process.peer

    @property
    def has_own_address(self) -> bool:
        """True if the node listens at the address by which this PC reaches it."""
        return bool(self.port and self.peer) and self.address == self.peer

    @classmethod
    async def open(cls, client: NodeClient) -> Member:
        """Start the command and read its hello, skipping output of login scripts.

        Raises:
            UserError: the node refuses.
            NodeUnreachable: it cannot be reached, or does not answer.
        """
        member = cls(client, await client.open_command("spread"))
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                left_bytes = _MAX_NOISE_BYTES
                while left_bytes > 0:
                    line = await member._line()
                    left_bytes -= len(line)
                    try:
                        hello = read_line(line)
                    except WireError:
                        continue
                    if isinstance(hello, SpreadHello):
                        member.address = hello.address
                        return member
            raise member.broken("it did not begin")
        except BaseException as error:
            await member.close()
            if isinstance(error, TimeoutError):
                raise NodeUnreachable(
                    f"{client.name} takes too long to begin a transfer", "Check its load"
                ) from error
            raise

    async def say(self, message: Message, data: bytes = b"") -> None:
        """Send a message with its data.

        Raises:
            NodeUnreachable: the connection broke, or the node takes nothing.
            BrokenPipeError: its command has ended, and `hear` raises the reason.
        """
        try:
            # A lock: messages and their data must not mix.
            async with self._writing, asyncio.timeout(STORE_TIMEOUT_S):
                await self._process.write(to_line(message) + data)
        except TimeoutError as error:
            raise NodeUnreachable(
                f"{self.name} takes too long to store a chunk", "Check its load and its disk"
            ) from error

    async def expect(self, kind: type[T]) -> T:
        """Return the next message, which has to be of one kind.

        Raises:
            UserError: the node refuses, or sends something else.
            NodeUnreachable: the connection broke, or it takes too long.
        """
        try:
            # The node first hashes the files that it has.
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                message, _ = await self.hear()
        except TimeoutError as error:
            raise NodeUnreachable(
                f"{self.name} takes too long to hash the files", "Check its disk"
            ) from error
        if not isinstance(message, kind):
            raise self.broken(f"it sent {type(message).__name__}")
        return message

    async def hear(self) -> tuple[Message, bytes]:
        """Return the next message of the node with its data.

        Raises:
            UserError: the node has failed, or sends an invalid message.
            NodeUnreachable: the connection broke.
        """
        line = await self._line()
        try:
            message = read_line(line)
        except WireError as error:
            raise self.broken(str(error)) from error
        if isinstance(message, SpreadFailed):
            hint = one_line(message.hint[:_MAX_SAID])
            raise UserError(f"{self.name}: {one_line(message.message[:_MAX_SAID])}", hint)
        if not isinstance(message, ChunkHeader):
            return message, b""
        if not 0 <= message.size_bytes <= CHUNK_BYTES:
            raise self.broken(f"it sent a chunk of {message.size_bytes} bytes")
        while len(self._buffer) < message.size_bytes:
            await self._more()
        data = bytes(self._buffer[: message.size_bytes])
        del self._buffer[: message.size_bytes]
        return message, data

    async def close(self) -> None:
        """End the node's part; the node keeps the chunks that it has."""
        await self._process.close(1.0)

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise self.broken("it sent a line without an end")
            await self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def _more(self) -> None:
        data = await self._process.read()
        if not data:
            said = self._process.stderr_text()[-400:]
            raise self.broken(f"it ended{': ' + said if said else ''}")
        self.heard_s = time.monotonic()
        self._buffer += data

    def broken(self, reason: str) -> UserError:
        """Return the protocol-violation error."""
        return UserError(
            f"The transfer to {self.name} broke off: {one_line(reason)}",
            "Start it again: what is complete is not sent twice",
        )

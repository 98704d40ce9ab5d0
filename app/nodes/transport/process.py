"""A command that runs on a node, with one interface over SSH, pipes and `wsl.exe`.

Output is returned in the portions in which it arrives: splitting them into lines costs half of what
`readline` costs per line, and raw bytes need no lines. The sender is paused when the output is not
read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

READ_AHEAD_BYTES = 4 << 20
"""Unread output beyond which the sender is paused, in bytes."""
WRITE_AHEAD_BYTES = 1 << 20
"""Unsent input beyond which `write` waits, in bytes."""
# Only the end of the error output is kept, in bytes: it explains failures, and several tracebacks
# fit.
_STDERR_KEPT_BYTES = 16 << 10


class Pipe(Protocol):
    """Interface of a transport to one running command."""

    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None:
        """Kill the command, or close its channel if that is not possible."""
        ...


class Process:
    """A running command: bytes in, bytes out, exit code. Created by `Connection.open`."""

    def __init__(self, lost: Callable[[str], Exception], peer: str = "") -> None:
        """`peer`: address of the PC where it runs, if our own TCP connection leads there."""
        self.peer = peer
        self._lost_error = lost
        self._pipe: Pipe | None = None
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._reading_paused = False
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._stdout_ended = False
        self._error: Exception | None = None
        self._stderr = bytearray()
        self._exit_code: int | None = None
        self._ended = asyncio.Event()
        self._afterwards: Callable[[], Awaitable[None]] | None = None

    # ------------------------------------------------------------ for callers

    async def read(self) -> bytes:
        """Wait for output and return it, at least one byte; empty at its end.

        Raises:
            NodeUnreachable: the connection broke.
        """
        # Output that arrived before the connection broke is returned before the error is raised.
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._stdout_ended:
                return b""
            self._arrived.clear()
            await self._arrived.wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._unread_bytes = 0
        # Resumed only once all is taken: pausing and resuming for each portion costs throughput.
        if self._reading_paused and self._pipe is not None:
            self._reading_paused = False
            self._pipe.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Send `data`; wait while more than WRITE_AHEAD_BYTES are unsent.

        Raises:
            NodeUnreachable: the connection broke.
            BrokenPipeError: the command does not read any more.
        """
        await self._writable.wait()
        # The end of a connection also wakes writers, or they would wait forever.
        if self._error is not None:
            raise self._error
        self.write_soon(data)
        await self._writable.wait()

    def write_soon(self, data: bytes) -> None:
        """Send a short `data` without waiting; raise BrokenPipeError like `write`."""
        if self._ended.is_set() or self._pipe is None:
            raise BrokenPipeError("the command has ended")
        self._pipe.write(data)

    def write_eof(self) -> None:
        """Close the input of the command."""
        if self._pipe is not None and not self._ended.is_set():
            with contextlib.suppress(OSError):
                self._pipe.write_eof()

    async def wait(self) -> int | None:
        """Wait for the end and return the exit code: negative for a signal, None if unknown."""
        await self._ended.wait()
        return self._exit_code

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def stderr_text(self) -> str:
        """Return the last lines of the error output so far."""
        return self._stderr.decode("utf-8", "replace").strip()

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the input, give the command `grace_s` seconds to exit, then kill it."""
        self.write_eof()
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), grace_s)
        if self._pipe is not None:
            self._pipe.close()
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            await afterwards()

    def close_with(self, afterwards: Callable[[], Awaitable[None]]) -> None:
        """Call `afterwards` in `close`, to close resources that only this command uses."""
        self._afterwards = afterwards

    # ------------------------------------------------------------ for the transport

    def attach(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def feed(self, data: bytes) -> None:
        self._chunks.append(data)
        self._unread_bytes += len(data)
        self._arrived.set()
        if self._unread_bytes > READ_AHEAD_BYTES and not self._reading_paused and self._pipe:
            self._reading_paused = True
            self._pipe.pause_reading()

    def feed_stderr(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[:-_STDERR_KEPT_BYTES]

    def end_output(self) -> None:
        self._stdout_ended = True
        self._arrived.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def exited(self, code: int | None) -> None:
        if self._exit_code is None:
            self._exit_code = code

    def closed(self, reason: str | None = None) -> None:
        """Mark the end; `reason` says why the connection broke, None if the command ended
        normally.
        """
        if reason is not None and self._error is None:
            self._error = self._lost_error(reason)
        self._stdout_ended = True
        self._ended.set()
        self._arrived.set()
        self._writable.set()

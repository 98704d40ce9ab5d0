"""Client of one node: sends requests, and reads and checks their answers.

A client is a permanent handle: it names a node, and each call uses the current link, opened on
demand. So callers do not notice a reconnect between two calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from agents.contract.messages import Progress, WireError, from_wire
from agents.contract.requests import QUICK_S, Answer, NodeRequest
from agents.contract.requests.streams import FollowStreams, UnfollowStreams
from agents.contract.run import StreamChunk
from app.errors import BadAnswer, RacklessError
from app.nodes.channel import read_lines
from app.nodes.link import Link
from app.nodes.transport.process import Process
from app.progress import OnProgress
from app.text import one_line

MAX_BACKLOG_BYTES = 32 << 20
"""Maximum followed log data that waits for its reader, in bytes; beyond it the subscription is
dropped and requested again."""


class NodeClient:
    """Client of one node. Every method raises UserError (which names the node), NodeUnreachable
    when no answer can arrive any more, or AgentBug.
    """

    def __init__(self, name: str, link: Callable[[], Awaitable[Link]]) -> None:
        self.name = name
        self._link = link

    async def ask(self, request: NodeRequest[Answer], progress: OnProgress | None = None) -> Answer:
        """Send a request and return its answer.

        Raises:
            BadAnswer: the answer is malformed, or answers another request.
        """

        def report(event: str, data: dict[str, Any]) -> None:
            if progress is not None and event == "progress":
                message, phase = str(data.get("message", "")), str(data.get("phase", ""))
                message = message if request.is_verbatim else one_line(message)
                progress(Progress(message=message, phase=phase))

        channel = (await self._link()).channel
        result = await channel.request(
            request.kind, request.to_args(), timeout_s=request.deadline_s(), on_event=report
        )
        try:
            return request.read_answer(result if request.is_verbatim else read_lines(result))
        except WireError as error:
            raise await self._distrust(request.kind, str(error)) from error

    async def follow_streams(
        self, run_id: str, attempt: int, offsets: Mapping[str, int]
    ) -> AsyncGenerator[StreamChunk]:
        """Yield what is appended to an attempt's streams from `offsets`, indefinitely.

        A stream that is not in `offsets` begins at 0 when it appears. Nothing is lost or repeated:
        if the reader falls far behind, the subscription is renewed at the offset it has reached.

        Raises:
            NodeUnreachable: the link was lost; follow again from the offsets reached.
        """
        reached = dict(offsets)
        while True:
            async with contextlib.aclosing(self._follow_once(run_id, attempt, reached)) as once:
                async for chunk in once:
                    yield chunk
                    # After the yield: a chunk is read once its reader asks for the next one.
                    reached[chunk.stream] = chunk.offset + decoded_size(chunk.data_base64)

    async def _follow_once(
        self, run_id: str, attempt: int, offsets: dict[str, int]
    ) -> AsyncGenerator[StreamChunk]:
        channel = (await self._link()).channel
        backlog = _Backlog()
        request = FollowStreams(run_id=run_id, attempt=attempt, offsets=offsets)
        follow_id, result = await channel.follow(
            request.kind, request.to_args(), backlog.take, timeout_s=QUICK_S
        )
        lost = asyncio.create_task(channel.wait_lost())
        # The reader waits for this event alone, so the loss of the channel must set it, too.
        lost.add_done_callback(lambda _: backlog.wake.set())
        try:
            while True:
                while backlog.chunks:
                    yield await self._read_chunk(request, backlog.next())
                # Checked after the chunks: what arrived before the loss is still delivered.
                if lost.done():
                    raise lost.result()
                # Ends this subscription only; `follow_streams` renews it at the offset reached.
                if backlog.is_full:
                    return
                # Nothing is awaited since the checks above, so no chunk slips in before the clear.
                backlog.wake.clear()
                await backlog.wake.wait()
        finally:
            lost.cancel()
            # Posted without an answer: the generator may be closing, or the link gone.
            channel.unfollow(follow_id)
            end = UnfollowStreams(follow=result.get("follow", follow_id))
            channel.post(end.kind, end.to_args())

    async def _read_chunk(self, request: FollowStreams, data: dict[str, Any]) -> StreamChunk:
        try:
            chunk = from_wire(StreamChunk, data)
            request.check_echo(chunk)
        except WireError as error:
            raise await self._distrust("stream.data", str(error)) from error
        return chunk

    async def open_command(self, *arguments: str) -> Process:
        """Start another command of the agent's archive, for a transfer of raw bytes."""
        return await (await self._link()).open_command(*arguments)

    async def _distrust(self, kind: str, reason: str) -> BadAnswer:
        """Return the error for a malformed answer, and show the problem next to the node."""
        with contextlib.suppress(RacklessError):
            (await self._link()).channel.complain(f"it answered {kind} in a wrong form: {reason}")
        return BadAnswer(
            f"{self.name} answered {kind} in a wrong form: {reason}",
            "Nothing of the answer was used. Check that PC, or remove it: "
            f"rackless nodes remove {self.name}",
            where=self.name,
        )


class _Backlog:
    """Bounded queue of followed data that the reader has not taken yet."""

    def __init__(self) -> None:
        self.chunks: deque[dict[str, Any]] = deque()
        self.wake = asyncio.Event()
        self.is_full = False
        self._size_bytes = 0

    def take(self, kind: str, data: dict[str, Any]) -> None:
        # Once full, all later chunks are dropped as well: a gap in a stream would be lost data.
        if kind != "stream.data" or self.is_full:
            return
        self._size_bytes += len(str(data.get("data_base64", "")))
        self.is_full = self._size_bytes > MAX_BACKLOG_BYTES
        self.chunks.append(data)
        self.wake.set()

    def next(self) -> dict[str, Any]:
        data = self.chunks.popleft()
        self._size_bytes -= len(str(data.get("data_base64", "")))
        return data


def decoded_size(data_base64: str) -> int:
    """Return the number of bytes that base64 text decodes to.

    >>> decoded_size("YWJj"), decoded_size("YWI="), decoded_size("YQ=="), decoded_size("")
    (3, 2, 1, 0)
    """
    return len(data_base64) * 3 // 4 - data_base64[-2:].count("=")

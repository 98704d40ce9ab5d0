"""Send requests to a node's agent over the stdio of one command, and dispatch its events.

Every request has exactly one outcome: its result, the error that the agent answered, a timeout, or
NodeUnreachable if the channel is lost first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from agents.contract.messages import (
    MAX_LINE_BYTES,
    Event,
    RemoteError,
    Request,
    Response,
    WireError,
    decode,
    encode,
)
from agents.contract.requests.connection import Cancel, Shutdown
from agents.contract.wire import shorten
from app.errors import AgentBug, BadAnswer, NodeUnreachable, RacklessError, UserError
from app.nodes.bootstrap import StartedAgent
from app.text import one_line

EventCallback = Callable[[str, dict[str, Any]], None]
"""Callback with an event's kind and data, on the event loop; must not block."""

MAX_BAD_LINES = 20
"""Number of unreadable lines after which the channel is dropped; a stray print is only one."""
MAX_MESSAGES_PER_S = 5000
"""Limit of messages per second, averaged over RATE_WINDOW_S, above which the channel is dropped. A
log at full speed comes in 50, and a burst of replayed samples has 600."""
RATE_WINDOW_S = 10.0
WORK_TIMEOUT_S = 24 * 3600.0
"""Maximum duration of a request without a limit of its own, such as an export, in seconds."""
MAX_COMPLAINT_CHARACTERS = 300
# Finds the id in a line that is not valid JSON; 18 digits fit into 64 bits.
_ID = re.compile(rb'"id": ?([0-9]{1,18})[,}]')

_log = logging.getLogger(__name__)


class MasterChannel:
    """Channel to one started agent. Create it inside a running event loop."""

    def __init__(self, agent: StartedAgent, where: str) -> None:
        self.hello = agent.hello
        self._process = agent.process
        self._where = where
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._callbacks: dict[int, EventCallback] = {}
        self.complaint = ""
        """Problem with the node's messages; empty if there was none so far."""
        self.complained: Callable[[str], None] = lambda about: None
        """Called with each complaint."""
        self._lost: NodeUnreachable | None = None
        self._num_bad_lines = 0
        self._rate = _Rate()
        self._ended = asyncio.Event()
        # A line is written in portions when the node is slow; two must not mix.
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read(agent.rest), name=f"channel to {where}")

    # ------------------------------------------------------------ requests

    async def request(
        self,
        kind: str,
        args: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_event: EventCallback | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its result; `on_event` gets the events of this request.

        Raises:
            UserError: the node cannot do it; the message is the node's own.
            NodeUnreachable: the channel was lost, or no answer came within `timeout_s`.
            AgentBug: the agent failed because of a bug.
        """
        request_id = next(self._ids)
        try:
            return await self._ask(request_id, kind, args, timeout_s, on_event)
        finally:
            self._callbacks.pop(request_id, None)

    async def follow(
        self, kind: str, args: dict[str, Any], on_event: EventCallback, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Subscribe to a stream of events, which reach `on_event` until `unfollow`.

        Returns the id for `unfollow` and the result. Raises what `request` raises.
        """
        request_id = next(self._ids)
        try:
            return request_id, await self._ask(request_id, kind, args, timeout_s, on_event)
        except BaseException:
            self._callbacks.pop(request_id, None)
            raise

    def unfollow(self, follow_id: int) -> None:
        """Ignore the events of a followed request from now on."""
        self._callbacks.pop(follow_id, None)

    def post(self, kind: str, args: dict[str, Any]) -> None:
        """Send a request without waiting for its answer; a lost channel is not an error."""
        # Not awaited: the caller may be closing, and backpressure does not matter for a short line.
        if self._lost is None:
            with contextlib.suppress(OSError):
                self._process.write_soon(encode(Request(id=next(self._ids), kind=kind, args=args)))

    # ------------------------------------------------------------ closing

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def wait_lost(self) -> NodeUnreachable:
        """Wait until the channel is lost, and return why."""
        await self._ended.wait()
        return self._lost or self._why("this PC closed it")

    async def close(self, grace_s: float = 2.0) -> None:
        """Ask the agent to exit, and kill it after `grace_s` seconds. Runs continue."""
        if self._lost is None:
            with contextlib.suppress(RacklessError, OSError, TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.request(Shutdown.kind)
        self._lose(self._why("this PC closed it"))
        self._reader.cancel()
        await self._process.close(grace_s)
        await asyncio.gather(self._reader, return_exceptions=True)

    def complain(self, about: str) -> None:
        """Remember a problem with the node's messages, which is shown next to the node's name."""
        _log.warning("%s: %s", self._where, about)
        self.complaint = one_line(about)[:MAX_COMPLAINT_CHARACTERS]
        self.complained(self.complaint)

    def drop(self, reason: str) -> None:
        """Abandon the channel at once, without notifying the node."""
        self._lose(self._why(reason))
        self._reader.cancel()

    # ------------------------------------------------------------ inside

    async def _ask(
        self,
        request_id: int,
        kind: str,
        args: dict[str, Any] | None,
        timeout_s: float | None,
        on_event: EventCallback | None,
    ) -> dict[str, Any]:
        if self._lost is not None:
            # A new exception each time: a shared one would collect the tracebacks of all callers.
            raise NodeUnreachable(self._lost.message, self._lost.hint, where=self._where)
        try:
            line = encode(Request(id=request_id, kind=kind, args=args or {}))
        except WireError as error:
            raise UserError(f"{self._where} cannot be asked '{kind}': {error}") from error
        limit_s = WORK_TIMEOUT_S if timeout_s is None else timeout_s
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # Registered before sending: the first event may arrive before `write` returns.
        self._pending[request_id] = answer
        if on_event is not None:
            self._callbacks[request_id] = on_event
        try:
            async with asyncio.timeout(limit_s):
                await self._send(line)
                return await answer
        except asyncio.CancelledError:
            # Only long work is worth cancelling on the node; a short request has ended by then.
            if timeout_s is None or on_event is not None:
                end = Cancel(request=request_id)
                self.post(end.kind, end.to_args())
            raise
        except TimeoutError as error:
            raise NodeUnreachable(
                f"{self._where} did not answer '{kind}' within {limit_s:.0f} s",
                "The PC may be overloaded; check its load and memory, then try again",
                where=self._where,
            ) from error
        finally:
            self._pending.pop(request_id, None)
            # If writing failed, no caller awaits the answer; asyncio would log its exception.
            if answer.done() and not answer.cancelled():
                answer.exception()

    async def _send(self, line: bytes) -> None:
        try:
            async with self._writing:
                await self._process.write(line)
        except NodeUnreachable as error:
            self._lose(error)
            raise
        except OSError as error:
            lost = self._why(f"the agent stopped reading: {error}")
            self._lose(lost)
            raise lost from error

    async def _read(self, rest: bytes) -> None:
        try:
            await self._read_lines(rest)
            # The last line of a Python traceback is the one that names the error.
            reason = self._process.stderr_text().rpartition("\n")[2] or "the agent ended"
            self._lose(self._why(reason))
        except NodeUnreachable as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - the edge: the message loop
            _log.exception("reading from %s failed", self._where)
            self._lose(self._why(f"a message could not be handled: {error}"))

    async def _read_lines(self, rest: bytes) -> None:
        data = rest
        rest = b""
        # Split and handled on the event loop as bytes arrive: events keep their order, and no
        # hidden queue grows.
        while True:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line)
            if self._rate.is_too_high(len(lines)):
                raise self._why(f"it sends more than {MAX_MESSAGES_PER_S} messages a second")
            if len(rest) > MAX_LINE_BYTES:
                raise self._why(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
            data = await self._process.read()
            if not data:
                return

    def _take(self, line: bytes) -> None:
        try:
            message = decode(line)
        except WireError as error:
            self._num_bad_lines += 1
            self.complain(f"it sent a line that is not a message: {error}")
            self._fail_named(line, error)
            if self._num_bad_lines > MAX_BAD_LINES:
                raise self._why(self.complaint) from error
            return
        if isinstance(message, Event):
            self._deliver(message)
        elif isinstance(message, Response):
            self._answer(message)

    def _fail_named(self, line: bytes, error: WireError) -> None:
        """Fail the request that an unreadable line seems to answer, or it would wait for its
        timeout.
        """
        found = _ID.search(line)
        waiting = self._pending.get(int(found[1])) if found else None
        if waiting is not None and not waiting.done():
            waiting.set_exception(
                BadAnswer(
                    f"{self._where} gave an answer that cannot be read: {error}",
                    "Nothing of it was used. Check that PC",
                    where=self._where,
                )
            )

    def _deliver(self, event: Event) -> None:
        # Request ids start at 1, so 0 stands for an event that belongs to no request.
        callback = self._callbacks.get(event.request_id or 0)
        if callback is not None:
            callback(event.kind, event.data)
        elif event.kind == "bad_line":
            _log.error("%s could not read a line of ours: %s", self._where, shorten(event.data))

    def _answer(self, response: Response) -> None:
        # The request may have timed out or been cancelled meanwhile.
        waiting = self._pending.get(response.id)
        if waiting is None or waiting.done():
            return
        if response.error is not None:
            waiting.set_exception(self._translate(response.error))
        else:
            waiting.set_result(response.result or {})

    def _translate(self, error: RemoteError) -> RacklessError:
        message = f"{self._where}: {one_line(error.message)}"
        if error.kind == "user":
            from app.troubleshooting import topic_of  # late: few answers need its page

            return UserError(
                message, one_line(error.hint), where=self._where, topic=topic_of(error.topic)
            )
        return AgentBug(message, error.traceback)

    def _lose(self, error: NodeUnreachable) -> None:
        """Fail all waiting requests; only the first reason counts."""
        if self._lost is not None:
            return
        self._lost = error
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._callbacks.clear()
        self._ended.set()

    def _why(self, reason: str) -> NodeUnreachable:
        return NodeUnreachable(
            f"The connection to {self._where} was lost: {reason}",
            "Check that the PC is on and reachable; runs on it keep training",
            where=self._where,
        )


def read_lines(value: Any) -> Any:
    """Return a node's answer with each text as one line without control characters."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, list):
        return [read_lines(item) for item in value]
    if isinstance(value, dict):
        return {key: read_lines(item) for key, item in value.items()}
    return value


class _Rate:
    """Counter of arrived messages in windows of RATE_WINDOW_S."""

    def __init__(self) -> None:
        # A fixed window, restarted when it is over: cheaper than a sliding one, and off by a factor
        # of two at most.
        self._began_s = time.monotonic()
        self._count = 0

    def is_too_high(self, num_more: int) -> bool:
        self._count += num_more
        passed_s = time.monotonic() - self._began_s
        is_over = self._count > MAX_MESSAGES_PER_S * RATE_WINDOW_S
        if is_over or passed_s > RATE_WINDOW_S:
            self._began_s, self._count = time.monotonic(), 0
        return is_over and passed_s < RATE_WINDOW_S

"""Serve the protocol on stdin and stdout: one request in, exactly one response out.

The main thread only reads lines and answers `ping`; every other request has a thread of its own, so
that a slow one does not delay the next line. One lock guards the real stdout, which is duplicated
at the start; `sys.stdout` then points to stderr, so that a stray print cannot break a message. A
master that reads slowly blocks the writers, which is the back-pressure for logs. Between lines the
main thread renews the telemetry lease. The process ends when stdin closes.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from agents.children import Children
from agents.contract.messages import (
    MAX_LINE_BYTES,
    Event,
    RemoteError,
    Request,
    Response,
    decode,
    encode,
)
from agents.contract.requests.connection import Cancel, Clock, Ping, Shutdown
from agents.contract.wire import WireError, to_wire
from agents.errors import ExpectedError
from agents.node.files import remove_half_made, remove_job_folders
from agents.serve.channel import AgentChannel, Call
from agents.serve.handlers import find_handler
from agents.shared.files.secrets import format_trace, hide_secrets
from agents.state import Home, archive_path

if TYPE_CHECKING:
    import socket

    from agents.serve.chats import Chat

MAX_REQUESTS = 64
"""Maximum number of concurrent requests; further ones are refused."""
READ_BYTES = 1 << 16
LEASE_RENEWAL_S = 60.0

# Maximum wait at the end for handlers to remove files of killed programs, in seconds.
_CLEAN_UP_S = 5.0


class Server:
    """Reads requests, runs their handlers, and answers each exactly once."""

    def __init__(self, home: Home, channel: AgentChannel) -> None:
        self._home = home
        self._channel = channel
        # Programs by the id of their request; the program of a chat outlives it.
        self._children: dict[int, Children] = {}
        # Threads by the id of the request that they handle.
        self._workers: dict[int, threading.Thread] = {}
        self._follows: dict[int, threading.Event] = {}
        self._chats: dict[str, Chat] = {}
        self._ports: deque[socket.socket] = deque()
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self._ending = False

    def run(self, source: int, between: Callable[[], None]) -> None:
        """Serve until `source` ends or `shutdown` comes; call `between` about once a minute."""
        try:
            for line in read_lines(source, between):
                self._take(line)
                if self._ending or self._channel.broken.is_set():
                    return
        finally:
            # A copy, since each follow removes itself when it ends.
            for ended in tuple(self._follows.values()):
                ended.set()
            self._end_programs()
            while self._ports:
                self._ports.popleft().close()

    def _end_programs(self) -> None:
        """Kill all programs, and let their handlers clean up."""
        working = []
        for number, children in tuple(self._children.items()):
            worker = self._workers.get(number)  # None if the program outlives its request
            if worker is not None and (children.is_busy or children.is_cancelled):
                working.append(worker)
            children.end_all()
        # One deadline for all: the master is gone, and the process must not linger.
        end_s = time.monotonic() + _CLEAN_UP_S
        for worker in working:
            worker.join(max(0.0, end_s - time.monotonic()))

    def _take(self, line: bytes | None) -> None:
        if line is None:
            self._report_bad_line(f"a line of more than {MAX_LINE_BYTES} bytes was skipped")
            return
        if not line.strip():
            return
        try:
            message = decode(line)
        except WireError as error:
            self._report_bad_line(str(error))
            return
        if isinstance(message, Request):
            self._start(message)

    def _report_bad_line(self, message: str) -> None:
        """Report a line that is not a request, and so gets no response."""
        error = RemoteError(kind="bad_request", message=message)
        self._channel.send(Event(kind="bad_line", data=to_wire(error)))

    def _start(self, request: Request) -> None:
        # Ping, shutdown and cancel need no thread, and must work when all slots are taken.
        if request.kind == Ping.kind:
            now = Clock(wall_s=time.time(), monotonic_s=time.monotonic())
            self._channel.send(Response(id=request.id, result=to_wire(now)))
        elif request.kind == Shutdown.kind:
            self._channel.send(Response(id=request.id, result={}))
            self._ending = True
        elif request.kind == Cancel.kind:
            self._channel.send(Response(id=request.id, result={}))
            number = request.args.get("request")
            children = self._children.get(number) if isinstance(number, int) else None
            if children is not None:
                # `cancel` waits for killed programs, which must not delay the next line.
                threading.Thread(target=children.cancel, daemon=True).start()
        # Refuse rather than wait, so that the main thread can still answer `ping`.
        elif self._slots.acquire(blocking=False):
            # A daemon thread, so that a hanging handler does not keep the process alive.
            worker = threading.Thread(target=self._work, args=(request,), daemon=True)
            self._workers[request.id] = worker
            worker.start()
        else:
            message = f"this node is already handling {MAX_REQUESTS} requests"
            error = RemoteError(kind="user", message=message, hint="Try again in a moment")
            self._channel.send(Response(id=request.id, error=error))

    def _work(self, request: Request) -> None:
        children = self._children[request.id] = Children()
        call = Call(
            request, self._home, self._channel, children, self._follows, self._chats, self._ports
        )
        try:
            try:
                self._channel.send(self._respond(call))
            finally:
                # Before `afterwards`, since a stream may last for days and must not hold a slot.
                self._slots.release()
                # The program of a chat outlives its request, and is killed with the server.
                if not children.is_busy:
                    self._children.pop(request.id, None)
            for action in call.afterwards:
                action()
        except Exception as error:  # noqa: BLE001 - the edge: a thread of the message loop
            sys.stderr.write(format_trace(error))
        finally:
            self._workers.pop(request.id, None)

    def _respond(self, call: Call) -> Response:
        request = call.request
        try:
            handler = find_handler(request.kind)
            if handler is None:
                message = f"this agent does not know the request {request.kind!r}"
                error = RemoteError(kind="unknown_request", message=message)
            else:
                answer = handler(call)
                result = {} if answer is None else to_wire(answer)
                response = Response(id=request.id, result=result)
                encode(response)  # raises WireError here if it is too long
                return response
        except ExpectedError as known:
            error = RemoteError(
                kind="user", message=known.message, hint=known.hint, topic=known.topic
            )
        except WireError as wrong:
            error = RemoteError(kind="bad_request", message=f"{request.kind}: {wrong}")
        except Exception as bug:  # noqa: BLE001 - the edge: a bug becomes a response
            error = describe_bug(request.kind, bug)
        # A failed request must not start its stream.
        call.afterwards.clear()
        return Response(id=request.id, error=error)


def describe_bug(kind: str, bug: BaseException) -> RemoteError:
    """Return the response to a request whose handler has a bug."""
    text = format_trace(bug)
    message = hide_secrets(f"{kind}: {type(bug).__name__}: {bug}")
    # Cut, so that the response fits into one line; a trace is most useful at its end.
    return RemoteError(kind="bug", message=message[:4000], traceback=text[-16000:])


def read_lines(source: int, between: Callable[[], None]) -> Iterator[bytes | None]:
    """Yield each line without its end, or None for a line that is too long.

    Holds at most MAX_LINE_BYTES + READ_BYTES in memory for any input.
    """
    parts: list[bytes] = []
    size, skipping = 0, False
    for block in _read_blocks(source, between):
        # Joined once per line, since adding block to block is quadratic for a long line.
        head, *lines = block.split(b"\n")
        size += len(head)
        parts.append(head)
        for line in lines:
            yield None if skipping or size > MAX_LINE_BYTES else b"".join(parts)
            parts, size, skipping = [line], len(line), False
        # Drop the beginning, but remember to skip the rest up to the newline.
        if size > MAX_LINE_BYTES:
            parts, skipping = [], True


def _read_blocks(source: int, between: Callable[[], None]) -> Iterator[bytes]:
    due = time.monotonic()
    while True:
        wait_s = due - time.monotonic()
        if wait_s <= 0:
            between()
            due, wait_s = time.monotonic() + LEASE_RENEWAL_S, LEASE_RENEWAL_S
        if not select.select([source], [], [], wait_s)[0]:
            continue
        # Unbuffered, since select does not see data in Python's buffer.
        block = os.read(source, READ_BYTES)
        if not block:
            return
        yield block


def serve(home: Home, out: int) -> None:
    """Answer the requests on stdin until the master disconnects; `out` is the real stdout."""
    remove_job_folders(home)
    server = Server(home, AgentChannel(out))
    recording = Recording(home)
    # Deleting large exports takes long, and must not delay the first request.
    threading.Thread(target=_remove_half_made, args=(home,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(0, recording.keep)
    # Not `sys.exit`: handler threads may sleep, or block in a write to an unread pipe.
    os._exit(0)


class Recording:
    """Keeps the telemetry recorder running while this server is alive."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._is_first = True

    def keep(self) -> None:
        """Renew the lease on another thread, since starting a process would delay the first
        request.
        """
        args = (self._home, archive_path(), self._is_first)
        # Only a new server replaces a recorder of another version; see telemetry/lease.py.
        self._is_first = False
        threading.Thread(target=_keep_recorder, args=args, daemon=True).start()


def _keep_recorder(home: Home, archive: str, replace: bool) -> None:
    from agents.telemetry.lease import keep_recorder

    keep_recorder(home, archive, replace)


def _remove_half_made(home: Home) -> None:
    with contextlib.suppress(OSError):  # another request may delete a run at the same time
        remove_half_made(home)

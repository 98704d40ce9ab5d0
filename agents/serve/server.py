"""Speak the protocol on stdin and stdout: one request in, exactly one response out.

The main thread only reads lines and answers `ping`; every other request has a thread of its own, so
that nothing slow holds up the next line. One lock guards the real stdout, which is duplicated at
the start; `sys.stdout` then points to stderr, so that no stray print can break a message. A master
that reads slowly blocks the writers: that is the back-pressure for logs. Between lines the main
thread renews the telemetry lease. The process ends when stdin closes.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
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
        # Programs by the id of their request; those of a chat outlive it.
        self._children: dict[int, Children] = {}
        # Threads by the id of the request that they handle.
        self._workers: dict[int, threading.Thread] = {}
        self._follows: dict[int, threading.Event] = {}
        self._chats: dict[str, Chat] = {}
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self._ending = False

    def run(self, source: int, between: Callable[[], None]) -> None:
        """Work until `source` ends or `shutdown` comes; call `between` about once a minute."""
        try:
            for line in read_lines(source, between):
                self._take(line)
                if self._ending or self._channel.broken.is_set():
                    return
        finally:
            # A copy: each follow removes itself when it ends.
            for ended in tuple(self._follows.values()):
                ended.set()
            self._end_programs()

    def _end_programs(self) -> None:
        """Kill all programs, and let their handlers clean up."""
        working = []
        for number, children in tuple(self._children.items()):
            worker = self._workers.get(number)  # none where a program outlasts its request
            if worker is not None and (children.is_busy or children.is_cancelled):
                working.append(worker)
            children.end_all()
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
        """Send an event about a line that is no request, and so gets no response."""
        error = RemoteError(kind="bad_request", message=message)
        self._channel.send(Event(kind="bad_line", data=to_wire(error)))

    def _start(self, request: Request) -> None:
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
                # It waits for killed programs; the next line must not.
                threading.Thread(target=children.cancel, daemon=True).start()
        # Refuse rather than wait: the main thread must stay free to answer `ping`.
        elif self._slots.acquire(blocking=False):
            # A daemon: a handler that hangs must not keep the process after the master is gone.
            worker = threading.Thread(target=self._work, args=(request,), daemon=True)
            self._workers[request.id] = worker
            worker.start()
        else:
            message = f"this node is already handling {MAX_REQUESTS} requests"
            error = RemoteError(kind="user", message=message, hint="Try again in a moment")
            self._channel.send(Response(id=request.id, error=error))

    def _work(self, request: Request) -> None:
        children = self._children[request.id] = Children()
        call = Call(request, self._home, self._channel, children, self._follows, self._chats)
        try:
            try:
                self._channel.send(self._respond(call))
            finally:
                # Before `afterwards`: a stream may go on for days and must not take up a slot.
                self._slots.release()
                # The program of a chat outlives its request, and must still be killed at the end.
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
                encode(response)  # a result that is too long must become an error here
                return response
        except ExpectedError as known:
            error = RemoteError(
                kind="user", message=known.message, hint=known.hint, topic=known.topic
            )
        except WireError as wrong:
            error = RemoteError(kind="bad_request", message=f"{request.kind}: {wrong}")
        except Exception as bug:  # noqa: BLE001 - the edge: a bug becomes an answer
            error = describe_bug(request.kind, bug)
        # A request that failed must not start its stream.
        call.afterwards.clear()
        return Response(id=request.id, error=error)


def describe_bug(kind: str, bug: BaseException) -> RemoteError:
    """Return the answer to a request whose handler has a bug."""
    text = format_trace(bug)
    message = hide_secrets(f"{kind}: {type(bug).__name__}: {bug}")
    return RemoteError(kind="bug", message=message[:4000], traceback=text[-16000:])


def read_lines(source: int, between: Callable[[], None]) -> Iterator[bytes | None]:
    """Yield each line without its end; None stands for one that was too long.

    Holds at most MAX_LINE_BYTES + READ_BYTES, whatever comes.
    """
    parts: list[bytes] = []
    size, skipping = 0, False
    for block in _read_blocks(source, between):
        # Joined only once per line: adding block to block would be quadratic for a long one.
        head, *lines = block.split(b"\n")
        size += len(head)
        parts.append(head)
        for line in lines:
            yield None if skipping or size > MAX_LINE_BYTES else b"".join(parts)
            parts, size, skipping = [line], len(line), False
        # Drop what came of it, but remember that the rest up to the newline belongs to it.
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
        # Not a buffered read: select would not see what already lies in Python's buffer.
        block = os.read(source, READ_BYTES)
        if not block:
            return
        yield block


def serve(home: Home, out: int) -> None:
    """Answer the requests on stdin until the master goes away; `out` is the real stdout."""
    remove_job_folders(home)
    server = Server(home, AgentChannel(out))
    recording = Recording(home)
    # Deleting large exports takes long, and the first request must not wait for it.
    threading.Thread(target=_remove_half_made, args=(home,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(0, recording.keep)
    # Handler threads may still sleep or block in a write to a pipe that nobody reads.
    os._exit(0)


class Recording:
    """Keeps the telemetry recorder running while this server lives."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._is_first = True

    def keep(self) -> None:
        """Renew the lease on another thread: starting a process would delay the first request."""
        args = (self._home, archive_path(), self._is_first)
        # Only a server that starts replaces a recorder of another version; see telemetry/lease.py.
        self._is_first = False
        threading.Thread(target=_keep_recorder, args=args, daemon=True).start()


def _keep_recorder(home: Home, archive: str, replace: bool) -> None:
    from agents.telemetry.lease import keep_recorder

    keep_recorder(home, archive, replace)


def _remove_half_made(home: Home) -> None:
    with contextlib.suppress(OSError):  # another request may delete a run at the same time
        remove_half_made(home)

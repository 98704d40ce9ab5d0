"""The process of an attempt's store: `main(LISTENING_DESCRIPTOR)`.

It reads the credential from stdin and serves until stdin ends, together with rank 0. Requests and
answers are lines of JSON; values are base64. The requests of one connection are answered in order,
so a client that waits for a key needs another connection for further requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from agents.rendezvous.credential import make_server_context
from agents.rendezvous.newcomers import Newcomers

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a request, in bytes."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum time for a client to present the credential, in seconds."""
MAX_CONNECTIONS = 512
"""Maximum number of connections, with or without the credential."""
MAX_NEWCOMERS, MAX_NEWCOMERS_PER_ADDRESS = 128, 64
"""Maximum number of callers that have not presented the credential yet, see `Newcomers`; the ranks
of one PC may all come at once."""
MAX_PER_ADDRESS = 128
"""Maximum number of connections of ranks per address, so that one node cannot take all."""
_BACKLOG = 256
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Keys:
    """Values by key, and the requests that wait for them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request.

        Raises:
            LookupError: a field is missing or the kind is unknown.
            ValueError: the value of a field is invalid.
        """
        answers: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "set": self._set,
            "get": self._get,
            "compare_set": self._compare_set,
            "add": self._add,
            "append": self._append,
            "check": self._check,
            "wait": self._wait,
            "delete": self._delete,
            "count": self._count,
        }
        return await answers[request["kind"]](request)

    async def _set(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._put(request["key"], _decode(request["value"]))
        return {}

    async def _get(self, request: dict[str, Any]) -> dict[str, Any]:
        missing = await self._wait_for([request["key"]], float(request["timeout_s"]))
        return {"missing": missing} if missing else {"value": self._read(request["key"])}

    async def _compare_set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Replace the value if it equals the expected one; a missing key counts as empty."""
        key, expected = request["key"], _decode(request["expected"])
        if key not in self._values and expected:
            return {"value": request["expected"]}
        if self._values.get(key, b"") == expected:
            await self._put(key, _decode(request["value"]))
        return {"value": self._read(key)}

    async def _add(self, request: dict[str, Any]) -> dict[str, Any]:
        # torch's stores keep counters as decimal text, and callers may read them by `get`.
        total = int(self._values.get(request["key"], b"0")) + int(request["amount"])
        await self._put(request["key"], str(total).encode("ascii"))
        return {"total": total}

    async def _append(self, request: dict[str, Any]) -> dict[str, Any]:
        old = self._values.get(request["key"], b"")
        await self._put(request["key"], old + _decode(request["value"]))
        return {}

    async def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"missing": self._missing(request["keys"])}

    async def _wait(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"missing": await self._wait_for(request["keys"], float(request["timeout_s"]))}

    async def _delete(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"deleted": self._values.pop(request["key"], None) is not None}

    async def _count(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        return {"count": len(self._values)}

    async def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, keys: list[str], timeout_s: float) -> list[str]:
        """Return the keys that are still missing after `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: not self._missing(keys)), timeout_s
                )
        return self._missing(keys)

    def _missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def _read(self, key: str) -> str:
        return base64.b64encode(self._values.get(key, b"")).decode("ascii")


def _decode(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


async def serve_caller(
    keys: Keys, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer an authenticated rank until it disconnects."""
    try:
        while line := await reader.readline():
            answer = await keys.answer(json.loads(line))
            writer.write(json.dumps(answer).encode("ascii") + b"\n")
            await writer.drain()
    # The client sent a malformed request, or its connection broke.
    except (LookupError, ValueError, TypeError, OSError) as error:
        print(f"Closed a connection to the store: {error!r}", file=sys.stderr, flush=True)
    finally:
        writer.close()


async def serve(listener: socket.socket, credential: str, gone: Callable[[], bool]) -> None:
    """Serve the store on `listener` until `gone` returns True when stdin becomes readable."""
    keys, ended = Keys(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report)
    loop.add_reader(0, lambda: ended.set() if gone() else None)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    doorman = _Doorman(keys, make_server_context(credential))
    accepting = asyncio.create_task(doorman.accept_all(listener))
    await ended.wait()
    accepting.cancel()
    # At once: the closed connections notify waiting clients that rank 0 has ended.
    os._exit(0)


class _Doorman:
    """Accepts callers, and lets in those with the credential."""

    def __init__(self, keys: Keys, context: ssl.SSLContext) -> None:
        self._keys = keys
        self._context = context
        self._newcomers = Newcomers(MAX_NEWCOMERS, MAX_NEWCOMERS_PER_ADDRESS)
        self._members: Counter[str] = Counter()
        """Number of connections of ranks, by address."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept_all(self, listener: socket.socket) -> None:
        """Accept callers until this task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                plain, (address, *_) = await loop.sock_accept(listener)
            except OSError:  # the caller has hung up, or too many files are open
                await asyncio.sleep(0.05)
                continue
            task = asyncio.create_task(self._serve(plain, str(address)))
            # asyncio itself keeps only a weak reference.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, plain: socket.socket, address: str) -> None:
        """Let a caller in once it has presented the credential."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        place = self._newcomers.admit(address, lambda: _cancel(task))
        reader = asyncio.StreamReader(MAX_LINE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                plain,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
        # Strangers: they speak no TLS, have no credential, or gave their place to the next one.
        except (OSError, asyncio.CancelledError):
            plain.close()
            return
        finally:
            self._newcomers.leave(place)
        if self._members[address] >= MAX_PER_ADDRESS:
            transport.abort()
            return
        self._members[address] += 1
        try:
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await serve_caller(self._keys, reader, writer)
        finally:
            self._members[address] -= 1


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def main(listening_descriptor: int) -> None:
    """Run the store's process; the first line of stdin contains the credential."""
    # The end of stdin is not enough: a fork of rank 0 may keep the other end open.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _limit_connections()
    credential = json.loads(_read_line())["credential"]
    listener = socket.socket(fileno=listening_descriptor)
    with contextlib.suppress(ssl.SSLError, KeyboardInterrupt):
        asyncio.run(serve(listener, credential, lambda: not os.read(0, 4096)))


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A traceback for each failed handshake of an unknown caller would fill the rank's log.
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


def _read_line() -> bytes:
    # Unbuffered: sys.stdin would read ahead, and the event loop would miss the end of stdin.
    line = b""
    while not line.endswith(b"\n") and (block := os.read(0, 65536)):
        line += block
    return line


def _limit_connections() -> None:
    """Limit the memory that callers can use: 300 KB per connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

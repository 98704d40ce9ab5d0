"""Requests between nodes of an attempt or a transfer: one line of JSON each way, over TLS 1.3.

Both ends present the credential of the attempt or transfer; the handshake fails without it. A node
listens at its own address only. Each request opens a new connection: this costs a handshake, but
leaves no state behind when a cable is cut.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from agents.contract.json_text import parse_json
from agents.contract.wire import WireError
from agents.errors import ExpectedError
from agents.rendezvous.credential import make_client_context, make_server_context
from agents.rendezvous.interfaces import bind_to

MAX_LINE_BYTES = 4 << 20
"""Maximum length of a request or an answer, in bytes."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum time of a TLS handshake, in seconds."""
IDLE_TIMEOUT_S = 60.0
"""Maximum time between two parts of a request or of files, in seconds."""
MAX_CONNECTIONS = 16
"""Maximum number of connections at once, with or without the credential."""
QUICK_TIMEOUT_S = 4.0
"""Maximum time for an answer that needs no work, in seconds."""

Answer = Callable[[dict[str, Any], BinaryIO], "dict[str, Any] | None"]
"""Handler of a request; returns None if it has written the answer to the stream itself."""


class PeerError(Exception):
    """Raised when another node is unreachable or refuses a request."""


@dataclass(frozen=True)
class Peer:
    """Another node of the attempt or transfer."""

    node: str
    address: str
    port: int
    credential: str

    def ask(
        self,
        kind: str,
        timeout_s: float = QUICK_TIMEOUT_S,
        connect_timeout_s: float = QUICK_TIMEOUT_S,
        **args: Any,
    ) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            PeerError: the node is unreachable, does not answer in time, or refuses.
        """
        with self._asking({"kind": kind, **args}, timeout_s, connect_timeout_s) as stream:
            return _read_answer(stream, self.node)

    @contextlib.contextmanager
    def receive(self, kind: str, idle_s: float = IDLE_TIMEOUT_S, **args: Any) -> Iterator[BinaryIO]:
        """Yield the stream of bytes that follows the answer to a request.

        Args:
            kind: kind of the request.
            idle_s: time without a byte after which the other node counts as gone.
            args: arguments of the request.

        Raises:
            PeerError: the node is unreachable or refuses.
        """
        with self._asking({"kind": kind, **args}, idle_s) as stream:
            _read_answer(stream, self.node)
            yield stream

    @contextlib.contextmanager
    def _asking(
        self, request: dict[str, Any], timeout_s: float, connect_timeout_s: float = QUICK_TIMEOUT_S
    ) -> Iterator[BinaryIO]:
        try:
            plain = socket.create_connection((self.address, self.port), connect_timeout_s)
            plain.settimeout(QUICK_TIMEOUT_S)  # for the handshake
            with make_client_context(self.credential).wrap_socket(plain) as channel:
                # A request that needs work, such as a verification, may wait longer.
                channel.settimeout(timeout_s)
                channel.sendall(json.dumps(request).encode("ascii") + b"\n")
                with channel.makefile("rb") as stream:
                    yield stream
        except OSError as error:  # includes ssl.SSLError
            raise PeerError(f"{self.node} does not answer: {error}") from error


def _read_answer(stream: BinaryIO, node: str) -> dict[str, Any]:
    try:
        answer = parse_json(stream.readline(MAX_LINE_BYTES))
    except WireError as error:
        raise PeerError(f"{node} has closed the connection") from error
    if not isinstance(answer, dict) or "error" in answer:
        # Bounded, because the text comes from another PC and ends up in messages.
        text = str(answer.get("error"))[:500] if isinstance(answer, dict) else "no answer"
        raise PeerError(f"{node} refuses: {text}")
    return answer


class Listener:
    """Server for the other nodes, with one thread per request."""

    def __init__(self, address: str, port: int, credential: str, answer: Answer) -> None:
        self._context = make_server_context(credential)
        self._answer = answer
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._socket = bind_to(address, port, backlog=MAX_CONNECTIONS)
        self.port: int = self._socket.getsockname()[1]
        """Port of the listening socket, chosen by the kernel if 0 was requested."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and return once all accepted requests are answered."""
        with contextlib.suppress(OSError):
            # close() alone would leave the other thread blocked in accept().
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        # All slots are free only when no request is being answered.
        for _ in range(MAX_CONNECTIONS):
            self._slots.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                # Refused, not queued: callers without the credential must not pile up here.
                plain.close()
                continue
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            # Failed handshakes of unknown callers and lost connections are not worth a log line.
            with contextlib.suppress(OSError), plain:
                plain.settimeout(HANDSHAKE_TIMEOUT_S)
                with self._context.wrap_socket(plain, server_side=True) as channel:
                    channel.settimeout(IDLE_TIMEOUT_S)
                    with channel.makefile("rwb", buffering=io.DEFAULT_BUFFER_SIZE) as stream:
                        self._reply(stream)
                    with contextlib.suppress(OSError, ValueError):
                        channel.unwrap()
        finally:
            self._slots.release()

    def _reply(self, stream: Any) -> None:
        try:
            request = parse_json(stream.readline(MAX_LINE_BYTES))
            if not isinstance(request, dict):
                raise WireError("a request must be a JSON object")
            answer = self._answer(request, stream)
        except (ExpectedError, PeerError, WireError) as error:
            answer = {"error": str(getattr(error, "message", error))}
        if answer is not None:
            stream.write(json.dumps(answer).encode("ascii") + b"\n")
        stream.flush()

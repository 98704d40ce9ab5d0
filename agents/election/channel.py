"""Requests between nodes of an attempt or a transfer: one line of JSON each way, over TLS 1.3.

Both ends present the credential of the attempt or transfer; the handshake fails without it. A node
listens at its own address only. Each request opens a new connection: this costs a handshake, but
leaves no state behind when a cable is cut. Nodes of an attempt sign requests and answers, too; see
`agents.election.member`.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from agents.contract.json_text import parse_json
from agents.contract.wire import WireError
from agents.election.member import ElectionMember
from agents.errors import ExpectedError
from agents.rendezvous.credential import make_client_context, make_server_context
from agents.rendezvous.interfaces import bind_to
from agents.rendezvous.newcomers import Newcomers

MAX_LINE_BYTES = 4 << 20
"""Maximum length of a request or an answer, in bytes."""
HANDSHAKE_TIMEOUT_S = 2.0
"""Maximum time between two messages of a TLS handshake, in seconds."""
REQUEST_TIMEOUT_S = 4.0
"""Maximum time between two parts of a request after the handshake, in seconds."""
IDLE_TIMEOUT_S = 60.0
"""Maximum time between two parts of a request or of files, in seconds."""
MAX_NEWCOMERS, MAX_NEWCOMERS_PER_ADDRESS = 64, 8
"""Maximum number of callers whose request has not arrived yet; see `Newcomers`."""
MAX_PER_CALLER = 16
"""Maximum number of requests of one caller that are answered at once."""
BACKLOG = 64
QUICK_TIMEOUT_S = 4.0
"""Maximum time for an answer that needs no work, in seconds."""

Answer = Callable[[dict[str, Any], BinaryIO], "dict[str, Any] | None"]
"""Handler of a request; returns None if it has written the answer to the stream itself. The field
`sender` of a request is the node that signed it, if the listener has an `ElectionMember`."""


class PeerError(Exception):
    """Raised when another node is unreachable or refuses a request."""


@dataclass(frozen=True)
class Peer:
    """Another node of the attempt or transfer."""

    node: str
    address: str
    port: int
    credential: str
    member: ElectionMember | None = None
    """Signs as this node; None: TLS is enough, as for a transfer."""

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
        with self._asking({"kind": kind, **args}, timeout_s, connect_timeout_s) as asked:
            return asked[1]

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
        with self._asking({"kind": kind, **args}, idle_s) as (stream, _):
            yield stream

    @contextlib.contextmanager
    def _asking(
        self, request: dict[str, Any], timeout_s: float, connect_timeout_s: float = QUICK_TIMEOUT_S
    ) -> Iterator[tuple[BinaryIO, dict[str, Any]]]:
        """Yield the stream and the answer to a request, which the stream has already given."""
        try:
            if self.member is not None:
                request = self.member.sign_request(self.node, request)
            plain = socket.create_connection((self.address, self.port), connect_timeout_s)
            plain.settimeout(QUICK_TIMEOUT_S)  # for the handshake
            with make_client_context(self.credential).wrap_socket(plain) as channel:
                # A request that needs work, such as a verification, may wait longer.
                channel.settimeout(timeout_s)
                channel.sendall(json.dumps(request).encode("ascii") + b"\n")
                with channel.makefile("rb") as stream:
                    yield stream, self._read_answer(stream, request)
        except OSError as error:  # includes ssl.SSLError
            raise PeerError(f"{self.node} does not answer: {error}") from error

    def _read_answer(self, stream: BinaryIO, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = parse_json(stream.readline(MAX_LINE_BYTES))
        except WireError as error:
            raise PeerError(f"{self.node} has closed the connection") from error
        if not isinstance(answer, dict) or "error" in answer:
            # Bounded, because the text comes from another PC and ends up in messages.
            text = str(answer.get("error"))[:500] if isinstance(answer, dict) else "no answer"
            raise PeerError(f"{self.node} refuses: {text}")
        if self.member is None:
            return answer
        try:
            return self.member.check_answer(self.node, request, answer)
        except WireError as error:
            raise PeerError(f"{self.node} is not believed: {error}") from error


class Listener:
    """Server for the other nodes, with one thread per request."""

    def __init__(
        self,
        address: str,
        port: int,
        credential: str,
        answer: Answer,
        member: ElectionMember | None = None,
        tell: Callable[..., None] | None = None,
    ) -> None:
        self._context = make_server_context(credential)
        self._answer = answer
        self._member = member
        self._tell = tell
        self._newcomers = Newcomers(MAX_NEWCOMERS, MAX_NEWCOMERS_PER_ADDRESS)
        self._callers: Counter[str] = Counter()
        """Number of requests that are being answered, by caller."""
        self._changed = threading.Condition()
        self._socket = bind_to(address, port, backlog=BACKLOG)
        self._is_closed = False
        self.port: int = self._socket.getsockname()[1]
        """Port of the listening socket, chosen by the kernel if 0 was requested."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and return once all requests that have arrived are answered."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            # close() alone would leave the other thread blocked in accept().
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._newcomers.end_all()
        with self._changed:
            self._changed.wait_for(lambda: not self._callers.total(), IDLE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                plain, (address, *_) = self._socket.accept()
            except OSError:
                # A caller that has hung up, or too many open files, must not end the listener.
                time.sleep(0.0 if self._is_closed else 0.1)
                continue
            threading.Thread(target=self._serve, args=(plain, str(address)), daemon=True).start()

    def _serve(self, plain: socket.socket, address: str) -> None:
        # Failed handshakes of unknown callers and lost connections are not worth a log line.
        with contextlib.suppress(OSError), plain, plain.dup() as other_end:
            # Through a copy, because the handshake takes `plain` away.
            place = self._newcomers.admit(address, lambda: _hang_up(other_end))
            try:
                plain.settimeout(HANDSHAKE_TIMEOUT_S)
                with self._context.wrap_socket(plain, server_side=True) as channel:
                    channel.settimeout(REQUEST_TIMEOUT_S)
                    with channel.makefile("rwb", buffering=io.DEFAULT_BUFFER_SIZE) as stream:
                        line = stream.readline(MAX_LINE_BYTES)
                        if not self._newcomers.leave(place):
                            return
                        channel.settimeout(IDLE_TIMEOUT_S)
                        self._reply(line, address, stream)
                    with contextlib.suppress(OSError, ValueError):
                        channel.unwrap()
            finally:
                self._newcomers.leave(place)

    def _reply(self, line: bytes, address: str, stream: Any) -> None:
        try:
            request = parse_json(line)
            if not isinstance(request, dict):
                raise WireError("a request must be a JSON object")
            caller = self._name(request, address)
            with self._counted(caller):
                # Counted until it is sent, because `close` waits for that.
                _write(stream, self._find_answer(request, stream))
        except (ExpectedError, PeerError, WireError) as error:
            _write(stream, {"error": str(getattr(error, "message", error))})

    def _name(self, request: dict[str, Any], address: str) -> str:
        """Return the node that signed the request, or the caller's address without signatures."""
        if self._member is None:
            return address
        try:
            return self._member.check_request(request)
        except WireError as error:
            if self._tell is not None:
                self._tell(address, str(request.get("kind"))[:40], str(error), is_refused=True)
            raise

    def _find_answer(self, request: dict[str, Any], stream: Any) -> dict[str, Any] | None:
        answer = self._answer(request, stream)
        if answer is None or self._member is None:
            return answer
        return self._member.sign_answer(request, answer)

    @contextlib.contextmanager
    def _counted(self, caller: str) -> Iterator[None]:
        """Refuse a caller that has too many requests here already: others need the node, too."""
        with self._changed:
            if self._callers[caller] >= MAX_PER_CALLER:
                raise WireError("this caller asks too much at once")
            self._callers[caller] += 1
        try:
            yield
        finally:
            with self._changed:
                self._callers[caller] -= 1
                self._changed.notify_all()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def _write(stream: Any, answer: dict[str, Any] | None) -> None:
    if answer is not None:
        stream.write(json.dumps(answer).encode("ascii") + b"\n")
    stream.flush()

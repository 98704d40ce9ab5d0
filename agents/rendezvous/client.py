"""The client of an attempt's store; any number of threads may use it."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from typing import Any

from agents.rendezvous.credential import make_client_context
from agents.rendezvous.host import StoreHost

ANSWER_TIMEOUT_S = 120.0
"""Maximum time for an answer, in seconds, in addition to the time that a request may wait."""
_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.05


class StoreError(RuntimeError):
    """Raised when the store is unreachable or has ended."""


class StoreTimeout(StoreError):
    """Raised when keys were not set in time."""


class StoreClient:
    """One rank's access to the store."""

    def __init__(self, address: str, port: int, credential: str) -> None:
        self._place = (address, port)
        self._context = make_client_context(credential)
        # A pool of connections: the server answers one request per connection at a time, so a
        # request that waits for a key must not block the requests of other threads.
        self._idle: list[_Connection] = []

    def connect(self, timeout_s: float, host: StoreHost | None = None) -> None:
        """Connect to the store, which may not have started yet.

        Args:
            timeout_s: maximum time to connect, in seconds.
            host: process of the store if this process started it.

        Raises:
            StoreError: the store was not reached within `timeout_s`, or has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = _Connection(self._place, self._context)
                # In TLS 1.3 the client's handshake ends before the server checks its certificate,
                # so a refusal shows only at the first request.
                connection.ask({"kind": "count"}, _CONNECT_TIMEOUT_S)
            except (OSError, EOFError) as error:
                if time.monotonic() >= deadline:
                    raise StoreError(_explain(error)) from error
                if host is not None and host.has_ended:
                    raise StoreError("the store's process has ended; see above") from error
                time.sleep(_RETRY_S)
            else:
                self._idle.append(connection)
                return

    def set(self, key: str, value: bytes) -> None:
        self._ask({"kind": "set", "key": key, "value": _encode(value)})

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return a value as soon as it is set.

        Raises:
            StoreTimeout: it was not set within `timeout_s`.
        """
        answer = self._ask({"kind": "get", "key": key, "timeout_s": timeout_s}, timeout_s)
        _expect_all(answer, timeout_s)
        return base64.b64decode(answer["value"])

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Replace a value if it equals `expected`; return the value of the key afterwards."""
        encoded = {"expected": _encode(expected), "value": _encode(value)}
        return base64.b64decode(self._ask({"kind": "compare_set", "key": key, **encoded})["value"])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask({"kind": "add", "key": key, "amount": amount})["total"])

    def append(self, key: str, value: bytes) -> None:
        self._ask({"kind": "append", "key": key, "value": _encode(value)})

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return not self._ask({"kind": "check", "keys": keys})["missing"]

    def wait(self, keys: list[str], timeout_s: float) -> None:
        """Wait until all keys are set.

        Raises:
            StoreTimeout: some were not set within `timeout_s`.
        """
        request = {"kind": "wait", "keys": keys, "timeout_s": timeout_s}
        _expect_all(self._ask(request, timeout_s), timeout_s)

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask({"kind": "delete", "key": key})["deleted"])

    def count(self) -> int:
        return int(self._ask({"kind": "count"})["count"])

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _ask(self, request: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        try:
            connection = self._take()
            answer = connection.ask(request, wait_s + ANSWER_TIMEOUT_S)
        except (OSError, EOFError) as error:
            raise StoreError(_explain(error)) from error
        self._idle.append(connection)
        return answer

    def _take(self) -> _Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return _Connection(self._place, self._context)


class _Connection:
    def __init__(self, place: tuple[str, int], context: ssl.SSLContext) -> None:
        plain = socket.create_connection(place, _CONNECT_TIMEOUT_S)
        # Without it, Nagle's algorithm would delay these small requests.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = context.wrap_socket(plain)
        self._lines = self._socket.makefile("rb")

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            OSError: no answer came in time.
            EOFError: the store has closed the connection.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(json.dumps(request).encode("ascii") + b"\n")
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                raise EOFError("rank 0 has closed the connection")
        except BaseException:
            self.close()  # a late answer must not be read as that of the next request
            raise
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _expect_all(answer: dict[str, Any], timeout_s: float) -> None:
    if missing := answer.get("missing"):
        raise StoreTimeout(f"not set within {timeout_s:g} s: {', '.join(missing)}")


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"the program at that port is not rank 0 of this attempt ({error.reason or error})"
    return str(error) or type(error).__name__

"""Measure the link between two nodes: reachability, round trip and bytes per second.

The listener takes one connection on a port that the system chose, since training too listens on
ephemeral ports. The connecting side sends a greeting, which it has from the listener by way of the
master, and the number of bytes to come, plays ping-pong with single bytes, then sends the bytes and
waits for the acknowledgement. Who does not know the greeting is sent away.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from agents.errors import ExpectedError
from agents.rendezvous.interfaces import bind_to, is_many

GREETING_BYTES = 16
GREETING_TIMEOUT_S = 2.0
"""Time for a caller to send the greeting, in seconds: until then nobody else is served."""
NUM_PINGS = 11
ACKNOWLEDGEMENT = b"!"
MAX_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 60.0
BLOCK_BYTES = 1 << 18
HEADER = struct.Struct("!16sQ")


@dataclass(frozen=True)
class LinkProbe:
    round_trip_s: float
    """Median round trip of the pings, in seconds."""
    bytes_per_s: float | None
    """Throughput; None: no bytes were sent."""


def choose_port(address: str) -> int:
    """Return a port of `address` that is free now.

    Raises:
        ExpectedError: the address is not one of this node's.
    """
    family = read_family(address)
    # Bound and not listening: nobody can connect meanwhile.
    with socket.socket(family, socket.SOCK_STREAM) as chosen:
        try:
            chosen.bind((address, 0))
        except OSError as error:
            raise _explain_not_ours(address, error) from error
        port: int = chosen.getsockname()[1]
        return port


def open_listener(address: str) -> socket.socket:
    """Return a socket that listens on a free port of `address`.

    Raises:
        ExpectedError: the address is not one of this node's.
    """
    read_family(address)
    try:
        return bind_to(address, 0, backlog=4)
    except OSError as error:
        raise _explain_not_ours(address, error) from error


def _explain_not_ours(address: str, error: OSError) -> ExpectedError:
    reason = "it is not one of this node's addresses"
    if error.errno not in (errno.EADDRNOTAVAIL, None):
        reason = error.strerror or str(error)
    return ExpectedError(
        f"This node cannot listen on {address}: {reason}.",
        "See the node's addresses: rackless nodes show NAME",
    )


def read_family(address: str) -> socket.AddressFamily:
    """Return the family of an address given in numbers; names are not resolved here.

    Raises:
        ExpectedError: it is not the address of one PC (`0.0.0.0` and `::` mean all interfaces).
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, address)
            if not is_many(address):
                return family
            raise ExpectedError(
                f"{address} stands for more than one interface, and Rackless listens on one alone.",
                "Write one address, as in 192.168.1.20",
            )
    raise ExpectedError(f"{address[:80]!r} is not an IP address.", "Write it as in 192.168.1.20")


def make_greeting() -> bytes:
    """Return a greeting that cannot be guessed."""
    return secrets.token_bytes(GREETING_BYTES)


def read_greeting(text: str) -> bytes:
    """Return the greeting in hexadecimal text.

    Raises:
        ExpectedError: it is none.
    """
    with contextlib.suppress(ValueError):
        greeting = bytes.fromhex(text)
        if len(greeting) == GREETING_BYTES:
            return greeting
    raise ExpectedError("The greeting of a link probe has to be 32 hexadecimal digits.")


def answer_probe(listener: socket.socket, greeting: bytes, timeout_s: float) -> None:
    """Serve one probe and close; return quietly when none comes in time or it breaks off."""
    deadline = time.monotonic() + timeout_s
    with listener:
        while (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, EOFError):
                connection.settimeout(min(left_s, GREETING_TIMEOUT_S))
                num_bytes = _read_header(connection, greeting)
                # Port scanners and strangers connect too; the probe may still come after them.
                if num_bytes is not None:
                    connection.settimeout(min(left_s, TRANSFER_TIMEOUT_S))
                    _answer(connection, num_bytes)
                    return


def _read_header(connection: socket.socket, greeting: bytes) -> int | None:
    """Return the number of bytes to come; None: the caller does not know the greeting."""
    _disable_delay(connection)
    said, num_bytes = HEADER.unpack(_receive(connection, HEADER.size))
    is_ours = hmac.compare_digest(said, greeting) and num_bytes <= MAX_BYTES
    return int(num_bytes) if is_ours else None


def _answer(connection: socket.socket, num_bytes: int) -> None:
    connection.sendall(ACKNOWLEDGEMENT)
    for _ in range(NUM_PINGS):
        connection.sendall(_receive(connection, 1))
    buffer = bytearray(BLOCK_BYTES)
    while num_bytes > 0:
        num_received = connection.recv_into(buffer, min(num_bytes, BLOCK_BYTES))
        if num_received == 0:
            return
        num_bytes -= num_received
    connection.sendall(ACKNOWLEDGEMENT)


def probe_link(address: str, port: int, greeting: bytes, num_bytes: int) -> LinkProbe:
    """Measure the link to a listener on another node.

    Raises:
        ExpectedError: no connection is possible, or it breaks during the measurement.
    """
    read_family(address)
    if not 0 < port < 1 << 16:
        raise ExpectedError(f"{port} is not a port; ports go from 1 to 65535.")
    where = f"{address} port {port}"
    try:
        connection = socket.create_connection((address, port), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise _explain_closed(where, error) from error
    with connection:
        try:
            connection.settimeout(TRANSFER_TIMEOUT_S)
            return _measure(connection, greeting, max(0, min(num_bytes, MAX_BYTES)))
        except (OSError, EOFError) as error:
            raise ExpectedError(
                f"The connection to {where} broke while it was measured: {error}."
            ) from (error)


def _measure(connection: socket.socket, greeting: bytes, num_bytes: int) -> LinkProbe:
    _disable_delay(connection)
    connection.sendall(HEADER.pack(greeting, num_bytes))
    _receive(connection, 1)
    # The acknowledgement above also keeps the other side's accept out of the first round trip.
    trips_s = []
    for _ in range(NUM_PINGS):
        began_s = time.monotonic()
        connection.sendall(b"?")
        _receive(connection, 1)
        trips_s.append(time.monotonic() - began_s)
    # The median: one ping that waits for a busy CPU or for ARP must not count.
    round_trip_s = sorted(trips_s)[NUM_PINGS // 2]
    if num_bytes == 0:
        return LinkProbe(round_trip_s, None)
    block = bytes(BLOCK_BYTES)
    began_s, left = time.monotonic(), num_bytes
    while left:
        left -= connection.send(block[: min(left, BLOCK_BYTES)])
    _receive(connection, 1)
    # The last byte's acknowledgement takes a round trip, which is no transfer time.
    taken_s = max(time.monotonic() - began_s - round_trip_s, 1e-6)
    return LinkProbe(round_trip_s, num_bytes / taken_s)


def _explain_closed(where: str, error: OSError) -> ExpectedError:
    if isinstance(error, TimeoutError):
        return ExpectedError(
            f"No answer from {where} within {CONNECT_TIMEOUT_S:g} s.",
            "Most often a firewall on that PC drops the connection; allow this node in it",
        )
    if isinstance(error, ConnectionRefusedError):
        return ExpectedError(
            f"{where} refused the connection.",
            "A firewall rejects it, or that PC forwards the port to another system (WSL in NAT "
            "mode does)",
        )
    return ExpectedError(
        f"There is no way to {where}: {error.strerror or error}.", "Check the cables"
    )


def _disable_delay(connection: socket.socket) -> None:
    # Nagle's algorithm would hold single bytes back and spoil the round trip.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        block = connection.recv(num_bytes - len(data))
        if not block:
            raise EOFError("the other side closed it")
        data += block
    return data

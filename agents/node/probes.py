"""Measure the link between two nodes: reachability, round trip and bytes per second.

The listener takes one connection on a port that the system chose, since training too listens on
ephemeral ports. The connecting side sends a greeting, which it has from the listener by way of the
master, and the number of bytes to come, plays ping-pong with single bytes, then sends the bytes and
waits for the acknowledgement. Who does not know the greeting is sent away.

The sender watches how much the other side has acknowledged, so a slow link is measured within a
moment, and one on which only small packets pass is told from a slow one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import secrets
import socket
import struct
import termios
import time

from agents.contract.node import LinkFailure, LinkProbe
from agents.errors import ExpectedError
from agents.rendezvous.interfaces import bind_to, is_many

GREETING_BYTES = 16
GREETING_TIMEOUT_S = 2.0
"""Time for a caller to send the greeting, in seconds: until then nobody else is served."""
NUM_PINGS = 11
ACKNOWLEDGEMENT = b"!"
MAX_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 3.0
"""Time for a connection, in seconds: the second of two repetitions comes after three."""
TRANSFER_TIMEOUT_S = 20.0
REPLY_TIMEOUT_S = 5.0
"""Time for the answer to a single byte, in seconds."""
MAX_SEND_S = 0.6
"""Time after which enough has been sent on a slow link, in seconds."""
STALL_S = 3.0
"""Time without any acknowledged byte after which a transfer stands still, in seconds."""
_LOOK_S = 0.05
# tcpi_total_retrans and tcpi_segs_out of struct tcp_info (linux/tcp.h).
_TCP_INFO_BYTES, _RESENT_AND_SENT = 144, (100, 136)
BLOCK_BYTES = 1 << 18
HEADER = struct.Struct("!16sQ")


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


def probe_link(
    address: str, port: int, greeting: bytes, num_bytes: int, segment_bytes: int | None = None
) -> LinkProbe:
    """Measure the link to a listener on another node; a link that fails is a result, too.

    Args:
        address: of the listener.
        port: of the listener.
        greeting: what it expects first.
        num_bytes: number of bytes to send; on a slow link fewer.
        segment_bytes: maximum payload of a packet; None: as the devices allow.

    Raises:
        ExpectedError: the address or the port is none.
    """
    family = read_family(address)
    if not 0 < port < 1 << 16:
        raise ExpectedError(f"{port} is not a port; ports go from 1 to 65535.")
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        if segment_bytes is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect((address, port))
        except OSError as error:
            return LinkProbe(failure=_name_failure(error), reason=error.strerror or str(error))
        try:
            connection.settimeout(REPLY_TIMEOUT_S)
            return _measure(connection, greeting, max(0, min(num_bytes, MAX_BYTES)))
        except (OSError, EOFError) as error:
            return LinkProbe(failure="broke", reason=str(error))


def _name_failure(error: OSError) -> LinkFailure:
    if isinstance(error, TimeoutError):
        return "dropped"
    return "refused" if isinstance(error, ConnectionRefusedError) else "no_way"


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
        return LinkProbe(round_trip_s=round_trip_s)
    return _transfer(connection, num_bytes, round_trip_s)


def _transfer(connection: socket.socket, num_bytes: int, round_trip_s: float) -> LinkProbe:
    """Send bytes until all have arrived, the time is over, or nothing passes."""
    block = bytes(BLOCK_BYTES)
    connection.settimeout(_LOOK_S)
    sent = acknowledged = 0
    began_s = moved_s = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            if sent < num_bytes:
                sent += connection.send(block[: min(num_bytes - sent, BLOCK_BYTES)])
            else:
                _receive(connection, 1)
                # The last byte's acknowledgement takes a round trip, which is no transfer time.
                taken_s = max(time.monotonic() - began_s - round_trip_s, 1e-6)
                return _describe(connection, round_trip_s, num_bytes / taken_s)
        now_s, arrived = time.monotonic(), sent - _count_unacknowledged(connection)
        if arrived > acknowledged:
            acknowledged, moved_s = arrived, now_s
        if now_s - moved_s > STALL_S:
            reason = f"{acknowledged} of {sent} bytes arrived, then none for {STALL_S:g} s"
            return LinkProbe(round_trip_s=round_trip_s, failure="stalled", reason=reason)
        if now_s - began_s > MAX_SEND_S and acknowledged and now_s - moved_s < 4 * _LOOK_S:
            _end_at_once(connection)
            return _describe(connection, round_trip_s, acknowledged / (now_s - began_s))


def _describe(connection: socket.socket, round_trip_s: float, bytes_per_s: float) -> LinkProbe:
    """Return what was measured, with the share of packets that the kernel had to send again."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    resent, sent = (struct.unpack_from("=I", info, place)[0] for place in _RESENT_AND_SENT)
    return LinkProbe(
        round_trip_s=round_trip_s,
        bytes_per_s=bytes_per_s,
        resent_share=resent / sent if sent else None,
    )


def _count_unacknowledged(connection: socket.socket) -> int:
    """Return the number of bytes that the other side has not acknowledged."""
    answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("=i", answer)[0])


def _end_at_once(connection: socket.socket) -> None:
    # Else the kernel would go on sending what it has, into the next measurement.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))


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

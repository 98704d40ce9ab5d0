"""Measure the link between two nodes: reachability, round trip and bytes per second.

The listener accepts one connection on an ephemeral port, because training listens on such ports,
too. The connecting side sends a greeting, which the listener gave it through the master, and the
number of bytes to come; plays ping-pong with single bytes; then sends the bytes and waits for the
acknowledgement. Callers without the greeting are disconnected.

The sender watches how many bytes TCP has acknowledged. So a slow link is measured in less than a
second, and a link that passes only small packets is distinguished from a slow one.
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
from collections import deque

from agents.contract.node import LinkFailure, LinkProbe
from agents.errors import ExpectedError
from agents.rendezvous.interfaces import bind_to, hold_port, is_many

GREETING_BYTES = 16
GREETING_TIMEOUT_S = 2.0
"""Maximum time for a caller to send the greeting, in seconds; other callers wait meanwhile."""
NUM_PINGS = 11
ACKNOWLEDGEMENT = b"!"
MAX_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 3.0
"""Maximum time to connect, in seconds; Linux repeats a SYN after 1 and 3 seconds."""
TRANSFER_TIMEOUT_S = 20.0
REPLY_TIMEOUT_S = 5.0
"""Maximum time for the answer to a single byte, in seconds."""
MAX_SEND_S = 0.6
"""Time after which a slow link is measured well enough, in seconds."""
STALL_S = 3.0
"""Time without an acknowledged byte after which a transfer counts as stalled, in seconds."""
_POLL_S = 0.05
# tcpi_total_retrans and tcpi_segs_out of struct tcp_info (linux/tcp.h).
_TCP_INFO_BYTES, _RESENT_AND_SENT = 144, (100, 136)
BLOCK_BYTES = 1 << 18
MAX_HELD_PORTS = 64
"""Maximum number of ports that are held for listeners of other processes."""
HEADER = struct.Struct("!16sQ")


def choose_port(address: str, held: deque[socket.socket]) -> int:
    """Return a free port of `address`, at which another process will listen, and hold it.

    A port that is only known to be free could be chosen again, or the kernel could give it to a
    connection, before that process listens. The newest ports are held by sockets that are bound and
    do not listen: callers are refused, and a listener that names the port still gets it.

    Args:
        address: address of this node.
        held: sockets of earlier ports, to which that of this one is added.

    Raises:
        ExpectedError: the address does not belong to this node.
    """
    read_family(address)
    try:
        held.append(hold_port(address, 0))
    except OSError as error:
        raise _explain_not_ours(address, error) from error
    port: int = held[-1].getsockname()[1]
    if len(held) > MAX_HELD_PORTS:
        held.popleft().close()
    return port


def open_listener(address: str) -> socket.socket:
    """Return a socket that listens on a free port of `address`.

    Raises:
        ExpectedError: the address does not belong to this node.
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
    """Return the family of a numeric address; names are not resolved.

    Raises:
        ExpectedError: it is not an address of a single PC (`0.0.0.0` and `::` mean all interfaces).
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, address)
            # Otherwise any host that reaches this PC could connect.
            if not is_many(address):
                return family
            raise ExpectedError(
                f"{address} stands for more than one interface, and Rackless listens on one only.",
                "Enter a single address, such as 192.168.1.20",
            )
    raise ExpectedError(
        f"{address[:80]!r} is not an IP address.", "Enter an address such as 192.168.1.20"
    )


def make_greeting() -> bytes:
    """Return a random greeting."""
    return secrets.token_bytes(GREETING_BYTES)


def read_greeting(text: str) -> bytes:
    """Return the greeting from hexadecimal text.

    Raises:
        ExpectedError: the text is not a greeting.
    """
    with contextlib.suppress(ValueError):
        greeting = bytes.fromhex(text)
        if len(greeting) == GREETING_BYTES:
            return greeting
    raise ExpectedError("The greeting of a link probe must be 32 hexadecimal digits.")


def answer_probe(listener: socket.socket, greeting: bytes, timeout_s: float) -> None:
    """Serve one probe and close; return silently if none arrives in time or it breaks off."""
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
                # After a port scanner or another caller, the probe may still arrive.
                if num_bytes is not None:
                    connection.settimeout(min(left_s, TRANSFER_TIMEOUT_S))
                    _answer(connection, num_bytes)
                    return


def _read_header(connection: socket.socket, greeting: bytes) -> int | None:
    """Return the number of bytes to come, or None for a wrong greeting."""
    _disable_delay(connection)
    said, num_bytes = HEADER.unpack(_receive(connection, HEADER.size))
    # In constant time, so that the greeting cannot be guessed byte by byte.
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
    """Measure the link to a listener on another node; a failure of the link is a result, too.

    Args:
        address: address of the listener.
        port: port of the listener.
        greeting: greeting that the listener expects.
        num_bytes: maximum number of bytes to send; fewer on a slow link.
        segment_bytes: maximum payload of a packet, or None for that of the devices.

    Raises:
        ExpectedError: the address or the port is invalid.
    """
    family = read_family(address)
    if not 0 < port < 1 << 16:
        raise ExpectedError(f"{port} is not a port; ports go from 1 to 65535.")
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        # A link that drops only large packets passes small segments, which shows a wrong MTU.
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
    # The acknowledgement above also excludes the other side's accept from the first round trip.
    trips_s = []
    for _ in range(NUM_PINGS):
        began_s = time.monotonic()
        connection.sendall(b"?")
        _receive(connection, 1)
        trips_s.append(time.monotonic() - began_s)
    # The median, so that a ping that waits for a busy CPU or for ARP does not count.
    round_trip_s = sorted(trips_s)[NUM_PINGS // 2]
    if num_bytes == 0:
        return LinkProbe(round_trip_s=round_trip_s)
    return _transfer(connection, num_bytes, round_trip_s)


def _transfer(connection: socket.socket, num_bytes: int, round_trip_s: float) -> LinkProbe:
    """Send bytes until all have arrived, `MAX_SEND_S` is over, or the transfer stalls."""
    block = bytes(BLOCK_BYTES)
    connection.settimeout(_POLL_S)
    sent = acknowledged = 0
    began_s = moved_s = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            if sent < num_bytes:
                sent += connection.send(block[: min(num_bytes - sent, BLOCK_BYTES)])
            else:
                _receive(connection, 1)
                # The final acknowledgement takes a round trip, which is not transfer time.
                taken_s = max(time.monotonic() - began_s - round_trip_s, 1e-6)
                return _describe(connection, round_trip_s, num_bytes / taken_s)
        # Not by the bytes sent, because the kernel buffers megabytes of them.
        now_s, arrived = time.monotonic(), sent - _count_unacknowledged(connection)
        if arrived > acknowledged:
            acknowledged, moved_s = arrived, now_s
        if now_s - moved_s > STALL_S:
            reason = f"{acknowledged} of {sent} bytes arrived, then none for {STALL_S:g} s"
            return LinkProbe(round_trip_s=round_trip_s, failure="stalled", reason=reason)
        if now_s - began_s > MAX_SEND_S and acknowledged and now_s - moved_s < 4 * _POLL_S:
            # A linger time of 0 discards unsent data, which would disturb the next measurement.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
            return _describe(connection, round_trip_s, acknowledged / (now_s - began_s))


def _describe(connection: socket.socket, round_trip_s: float, bytes_per_s: float) -> LinkProbe:
    """Return the measurement, with the share of packets that the kernel retransmitted."""
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


def _disable_delay(connection: socket.socket) -> None:
    # Nagle's algorithm would delay single bytes and distort the round trip.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        block = connection.recv(num_bytes - len(data))
        if not block:
            raise EOFError("the other side closed the connection")
        data += block
    return data

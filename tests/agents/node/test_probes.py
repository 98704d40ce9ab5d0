"""The way between two nodes: open, closed, silent, or lying."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.errors import ExpectedError
from agents.node import probes
from agents.node.probes import (
    HEADER,
    answer_probe,
    choose_port,
    make_greeting,
    open_listener,
    probe_link,
    read_greeting,
)
from agents.rendezvous.interfaces import hold_port

GREETING = make_greeting()
ROOT = Path(__file__).parents[3]


Held = deque[socket.socket]


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    for one in held:
        one.close()


def test_chosen_port_is_free(held: Held) -> None:
    port = choose_port("127.0.0.1", held)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_chosen_port_is_neither_chosen_again_nor_given_to_a_connection() -> None:
    """Of few free ports, rank 0 and the recovery of a node once got the same one."""
    code = """
import socket
from collections import deque
from pathlib import Path
from agents.node.probes import choose_port
from agents.rendezvous.interfaces import hold_port
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("41000 41031")
HERE = "127.0.0.1"
first, second = deque(), deque()  # of two processes
chosen = {choose_port(HERE, held) for held in (first, second) for _ in range(8)}
assert len(chosen) == 16, chosen
server = socket.create_server((HERE, 50000), backlog=64)
calls = []
for _ in range(10):
    calls.append(socket.create_connection((HERE, 50000)))
assert not chosen & {call.getsockname()[1] for call in calls}
ranks = [socket.create_server((HERE, port)) for port in chosen]
held = hold_port(HERE, 50001)
socket.create_server((HERE, 50001))
"""
    python = [sys.executable, "-c", f"import os\nos.system('ip link set lo up')\n{code}"]
    ran = subprocess.run(
        ["unshare", "--net", *python], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if "unshare failed" in ran.stderr:
        pytest.skip(f"needs network namespaces: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr


def test_a_port_that_listens_cannot_be_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        hold_port("127.0.0.1", server.getsockname()[1])


def test_address_of_another_pc_is_refused() -> None:
    with pytest.raises(ExpectedError) as caught:
        choose_port("203.0.113.7", Held())
    assert "cannot listen on 203.0.113.7: it is not one of this node's addresses" in (
        caught.value.message
    )


@pytest.mark.parametrize("address", ["", "localhost", "999.1.1.1", "a" * 300, "1.2.3.4\0"])
def test_what_is_no_address_is_refused(address: str) -> None:
    for ask in (lambda: choose_port(address, Held()), lambda: probe_link(address, 80, GREETING, 0)):
        with pytest.raises(ExpectedError, match="is not an IP address"):
            ask()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1"])
def test_every_interface_at_once_is_refused(address: str) -> None:
    for ask in (lambda: choose_port(address, Held()), lambda: open_listener(address)):
        with pytest.raises(ExpectedError, match="stands for more than one interface"):
            ask()


@pytest.mark.parametrize("text", ["", "00", "zz" * 16, "00" * 17])
def test_what_is_no_greeting_is_refused(text: str) -> None:
    with pytest.raises(ExpectedError, match="32 hexadecimal digits"):
        read_greeting(text)


@pytest.mark.parametrize("port", [-1, 0, 65536, 1 << 40])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ExpectedError, match="is not a port"):
        probe_link("127.0.0.1", port, GREETING, 0)


@pytest.mark.parametrize("num_bytes", [0, 1, 3_000_001])
def test_probe_measures(num_bytes: int) -> None:
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    thread = threading.Thread(target=answer_probe, args=(listener, GREETING, 10.0))
    thread.start()
    link = probe_link("127.0.0.1", port, GREETING, num_bytes)
    thread.join(5)
    assert not thread.is_alive()
    assert 0 < link.round_trip_s < 1
    assert (link.bytes_per_s is None) is (num_bytes == 0)
    assert link.bytes_per_s is None or link.bytes_per_s > 0
    assert probe_link("127.0.0.1", port, GREETING, 0).failure == "refused"


def test_silent_listener_breaks_the_probe_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REPLY_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = probe_link("127.0.0.1", silent.getsockname()[1], GREETING, 100)
    assert (link.failure, link.reason) == ("broke", "timed out")


@pytest.mark.parametrize(("pause_s", "failure"), [(9.0, "stalled"), (0.01, None)])
def test_link_that_stands_still_is_told_from_a_slow_one(
    pause_s: float, failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side takes 64 KiB at a time from a small buffer, then pauses."""
    monkeypatch.setattr(probes, "STALL_S", 0.5)
    monkeypatch.setattr(probes, "MAX_SEND_S", 0.4)
    done = threading.Event()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(HEADER.size)
                connection.sendall(b"!")
                for _ in range(probes.NUM_PINGS):
                    connection.sendall(connection.recv(1))
                while not done.wait(pause_s) and connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        link = probe_link("127.0.0.1", listener.getsockname()[1], GREETING, 1 << 28)
        done.set()
        thread.join(5)
    assert link.failure == failure
    assert (link.bytes_per_s is None) == (failure is not None)
    assert ("bytes arrived, then none" in link.reason) == (failure is not None)


def talk(port: int, say: Callable[[socket.socket], None]) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        say(connection)


def test_strangers_do_not_use_up_the_listener() -> None:
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    thread = threading.Thread(target=answer_probe, args=(listener, GREETING, 10.0))
    thread.start()
    talk(port, lambda c: c.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
    talk(port, lambda c: c.sendall(HEADER.pack(GREETING, 1 << 62)))
    talk(port, lambda c: c.sendall(HEADER.pack(b"RACKLESSPROBE1\n\0", 1)))
    talk(port, lambda c: None)
    assert probe_link("127.0.0.1", port, GREETING, 10).bytes_per_s
    thread.join(5)


def test_listener_gives_up_in_time() -> None:
    listener = open_listener("127.0.0.1")
    began_s = time.monotonic()
    answer_probe(listener, GREETING, 0.3)
    assert time.monotonic() - began_s < 2
    assert listener.fileno() == -1

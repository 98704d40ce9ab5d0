"""The store of an attempt: its keys, who gets in, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from agents.errors import ExpectedError
from agents.rendezvous.client import StoreClient, StoreError, StoreTimeout
from agents.rendezvous.host import start_store
from agents.rendezvous.server import MAX_CONNECTIONS, MAX_PER_ADDRESS
from app.nodes.credential import make_credential
from tests.agents.trainer.ranks import free_port
from tests.draws import random_bytes

HOME = "127.0.0.1"


@pytest.fixture(scope="module")
def credential() -> str:
    return make_credential()


@pytest.fixture
def port(credential: str) -> Iterator[int]:
    """A running store."""
    chosen = free_port()
    host = start_store(HOME, chosen, credential)
    yield chosen
    host.close()


@pytest.fixture
def client(port: int, credential: str) -> Iterator[StoreClient]:
    made = StoreClient(HOME, port, credential)
    made.connect(10.0)
    yield made
    made.close()


def test_keys_behave_as_in_torchs_own_stores(client: StoreClient) -> None:
    from torch import distributed as dist

    ours, theirs = client, dist.HashStore()
    ours.set("a", b"\x00\xff")
    theirs.set("a", b"\x00\xff")
    assert ours.get("a", 1) == theirs.get("a")
    for amount in (3, -1):
        assert ours.add("n", amount) == theirs.add("n", amount)
    assert ours.get("n", 1) == theirs.get("n")
    for expected, value in (("", "x"), ("y", "z"), ("x", "w"), ("w", "")):
        found = ours.compare_set("c", expected.encode(), value.encode())
        assert found == theirs.compare_set("c", expected, value)
    assert ours.compare_set("none", b"y", b"z") == theirs.compare_set("none", "y", "z")
    ours.append("a", b"!")
    assert ours.get("a", 1) == b"\x00\xff!"
    assert ours.count() == theirs.num_keys() == 3
    assert (ours.delete("a"), ours.delete("a")) == (True, False)
    assert (ours.check(["n", "c"]), ours.check(["n", "a"])) == (True, False)


def test_who_waits_for_a_key_holds_up_nobody(client: StoreClient) -> None:
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(client.get("late", 10)))
    waiting.start()
    time.sleep(0.1)
    client.set("late", b"here")
    waiting.join(5)
    assert found == [b"here"]
    with pytest.raises(StoreTimeout, match=r"not set within 0\.1 s: never, nowhere"):
        client.wait(["never", "late", "nowhere"], 0.1)


def test_a_large_value_and_many_threads(client: StoreClient) -> None:
    large = random_bytes(3 << 20)
    client.set("large", large)
    threads = [threading.Thread(target=client.add, args=("sum", 1)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.get("large", 1) == large
    assert client.add("sum", 0) == 20


def test_another_attempts_credential_does_not_get_in(client: StoreClient, port: int) -> None:
    with pytest.raises(StoreError):
        StoreClient(HOME, port, make_credential()).connect(0.5)
    assert client.count() == 0


def test_rank_0_of_another_attempt_is_not_believed(port: int) -> None:
    with pytest.raises(StoreError, match="not rank 0 of this attempt"):
        StoreClient(HOME, port, make_credential()).connect(0.0)


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b'{"kind": "set", "key": "a", "value": "YQ=="}\n',
     b"\x16\x03\x01\xff\xff" + bytes(70000), random_bytes(4096)],
    ids=["nothing", "http", "a-request", "a-broken-handshake", "noise"],
)  # fmt: skip
def test_strangers_who_speak_without_a_handshake_are_not_heard(
    client: StoreClient, port: int, words: bytes
) -> None:
    strangers = [socket.create_connection((HOME, port), 5) for _ in range(50)]
    for stranger in strangers:
        with contextlib.suppress(OSError):  # it may have been hung up on already
            stranger.sendall(words)
    client.set("b", b"1")
    assert client.check(["b"])
    assert not client.check(["a"])
    for stranger in strangers:
        stranger.close()


def test_a_silent_stranger_is_hung_up_on(client: StoreClient, port: int) -> None:
    with socket.create_connection((HOME, port), 5) as stranger:
        stranger.settimeout(20)
        assert stranger.recv(1) == b""


def test_a_member_that_sends_nonsense_loses_its_connection_alone(
    client: StoreClient, port: int, credential: str
) -> None:
    from agents.rendezvous.credential import make_client_context

    for line in (b"{}\n", b"[]\n", b'{"kind": "add", "key": "a", "amount": "x"}\n', b"\xff\n"):
        with (
            socket.create_connection((HOME, port), 5) as plain,
            make_client_context(credential).wrap_socket(plain) as member,
        ):
            member.sendall(line)
            assert member.recv(1) == b""
    assert client.count() == 0


def test_the_store_ends_with_the_process_that_started_it(credential: str) -> None:
    port = free_port()
    code = (
        "import sys, time; from agents.rendezvous.host import start_store;"
        f"host = start_store('{HOME}', {port}, sys.stdin.read());"
        "print(host._process.pid, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(credential)
        owner.stdin.close()
        pid = int(owner.stdout.readline())
        client = StoreClient(HOME, port, credential)
        client.connect(10.0)
        owner.send_signal(signal.SIGKILL)
        with pytest.raises(StoreError):
            client.get("never", 20)
    end = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_its_key_is_in_no_argument_and_no_variable(credential: str) -> None:
    host = start_store(HOME, free_port(), credential)
    secret = credential.splitlines()[1].encode()
    pid = host._process.pid
    for name in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{name}", "rb") as file:
            assert secret not in file.read()
    host.close()


def test_a_store_that_cannot_start_is_said_at_once() -> None:
    port = free_port()
    host = start_store(HOME, port, "no credential")
    started_s = time.monotonic()
    with pytest.raises(StoreError, match="the store's process has ended"):
        StoreClient(HOME, port, make_credential()).connect(60.0, host)
    assert time.monotonic() - started_s < 20
    host.close()


def test_the_memory_that_silent_strangers_take_is_bounded(credential: str) -> None:
    port = free_port()
    host = start_store(HOME, port, credential)
    client = StoreClient(HOME, port, credential)
    client.connect(10.0)
    with open(f"/proc/{host._process.pid}/limits") as limits:
        (line,) = (line for line in limits if line.startswith("Max open files"))
    assert int(line.split()[3]) <= MAX_CONNECTIONS
    client.close()
    host.close()


def refused(address: str, port: int, credential: str) -> str:
    with pytest.raises(ExpectedError) as caught:
        start_store(address, port, credential)
    return f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "0", "0x0", "::ffff:0:0", "224.0.0.1"])
def test_it_never_listens_on_every_interface(address: str, credential: str) -> None:
    assert "Rank 0 cannot listen on" in refused(address, free_port(), credential)


def test_a_port_that_is_taken_and_an_address_of_another_pc_are_said(credential: str) -> None:
    with socket.create_server((HOME, 0)) as taken:
        port = taken.getsockname()[1]
        assert "another program uses that port. Start or resume the run again" in refused(
            HOME, port, credential
        )
    assert "nodes show" in refused("203.0.113.7", port, credential)


def test_ipv6_works_too(credential: str) -> None:
    port = free_port()
    host = start_store("::1", port, credential)
    client = StoreClient("::1", port, credential)
    client.connect(10.0)
    assert client.add("a", 1) == 1
    client.close()
    host.close()


def test_any_number_of_idle_callers_keeps_no_rank_out(port: int, credential: str) -> None:
    idle = [socket.create_connection((HOME, port), 5) for _ in range(300)]
    late = StoreClient(HOME, port, credential)
    late.connect(10.0)
    late.set("a", b"1")
    # The first ones gave their places to the last ones.
    idle[0].settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        assert idle[0].recv(1) == b""
    assert late.check(["a"])
    late.close()
    for caller in idle:
        caller.close()


def test_one_node_cannot_take_all_places_of_the_ranks(port: int, credential: str) -> None:
    from agents.rendezvous.credential import make_client_context

    context = make_client_context(credential)
    taken: list[socket.socket] = []
    for _ in range(MAX_PER_ADDRESS + 5):
        plain = socket.create_connection((HOME, port), 5, ("127.0.0.9", 0))
        member = context.wrap_socket(plain)
        # Each handshake is complete before the next one begins.
        with contextlib.suppress(OSError):
            member.sendall(b'{"kind": "count"}\n')
            if member.recv(100):
                taken.append(member)
    assert len(taken) == MAX_PER_ADDRESS
    other = StoreClient(HOME, port, credential)
    other.connect(10.0)
    assert other.count() == 0
    other.close()
    for member in taken:
        member.close()

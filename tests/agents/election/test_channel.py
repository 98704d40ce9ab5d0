"""A listener of an attempt or a transfer, and callers that say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest

from agents.contract.signatures import make_seed, public_key
from agents.election.channel import (
    MAX_NEWCOMERS_PER_ADDRESS,
    MAX_PER_CALLER,
    Listener,
    Peer,
    PeerError,
)
from agents.election.member import ElectionMember
from agents.rendezvous.credential import make_client_context
from app.nodes.credential import make_credential

HOME = "127.0.0.1"


@pytest.fixture(scope="module")
def credential() -> str:
    return make_credential()


@pytest.fixture
def listener(credential: str) -> Iterator[Listener]:
    made = Listener(HOME, 0, credential, lambda request, stream: {"said": request["kind"]})
    yield made
    made.close()


def connect(listener: Listener, address: str = HOME) -> socket.socket:
    return socket.create_connection((HOME, listener.port), 5, (address, 0))


def is_hung_up(caller: socket.socket) -> bool:
    caller.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        return caller.recv(1) == b""
    return True


def test_idle_callers_without_a_key_keep_nobody_out(listener: Listener, credential: str) -> None:
    peer = Peer("a", HOME, listener.port, credential)
    idle = [connect(listener, f"127.0.0.{number % 9 + 1}") for number in range(300)]
    for _ in range(5):
        assert peer.ask("hello") == {"said": "hello"}
    assert is_hung_up(idle[0]), "it gave its place to a later one"
    last = idle[-MAX_NEWCOMERS_PER_ADDRESS // 2 :]
    assert all(map(is_hung_up, last)), "a handshake has to be quick"
    for caller in idle:
        caller.close()


def test_nor_do_those_that_have_the_credential_and_ask_nothing(
    listener: Listener, credential: str
) -> None:
    context = make_client_context(credential)
    idle = []
    for _ in range(40):
        with contextlib.suppress(OSError):  # it gave its place to a later one
            idle.append(context.wrap_socket(connect(listener)))
    assert Peer("a", HOME, listener.port, credential).ask("hello") == {"said": "hello"}
    for caller in idle:
        caller.close()


def test_requests_of_one_node_do_not_take_the_places_of_others(credential: str) -> None:
    seeds = {name: make_seed() for name in "abc"}
    keys = {name: public_key(seed) for name, seed in seeds.items()}

    def member(name: str) -> ElectionMember:
        return ElectionMember("run-1", 1, name, seeds[name], keys)

    may_end, began = threading.Event(), threading.Semaphore(0)

    def answer(request: dict[str, Any], stream: BinaryIO) -> dict[str, Any]:
        if request["kind"] == "wait":
            began.release()
            may_end.wait(60)
        return {}

    listener = Listener(HOME, 0, credential, answer, member("a"))
    of_c = Peer("a", HOME, listener.port, credential, member("c"))
    waiting = [
        threading.Thread(target=of_c.ask, args=("wait", 60.0)) for _ in range(MAX_PER_CALLER)
    ]
    for thread in waiting:
        thread.start()
    for _ in waiting:
        assert began.acquire(timeout=60)
    with pytest.raises(PeerError, match="asks too much at once"):
        of_c.ask("hello")
    assert Peer("a", HOME, listener.port, credential, member("b")).ask("hello") == {}
    may_end.set()
    for thread in waiting:
        thread.join(60)
    assert of_c.ask("hello") == {}
    listener.close()


def test_a_listener_answers_what_has_arrived_before_it_closes(credential: str) -> None:
    may_end, began = threading.Event(), threading.Event()

    def answer(request: dict[str, Any], stream: BinaryIO) -> dict[str, Any]:
        began.set()
        may_end.wait(60)
        return {"said": "late"}

    listener = Listener(HOME, 0, credential, answer)
    idle = connect(listener)
    found: list[dict[str, Any]] = []
    peer = Peer("a", HOME, listener.port, credential)
    asking = threading.Thread(target=lambda: found.append(peer.ask("hello", 60.0)))
    asking.start()
    assert began.wait(60)
    closing = threading.Thread(target=listener.close)
    closing.start()
    may_end.set()
    for thread in (asking, closing):
        thread.join(60)
    assert found == [{"said": "late"}]
    assert is_hung_up(idle)

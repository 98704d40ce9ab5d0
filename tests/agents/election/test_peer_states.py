"""What other nodes say, while one of them is behind a cut cable."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.contract.election import NodeState
from agents.contract.wire import to_wire
from agents.election import process as regrouping
from agents.election.channel import PeerError
from agents.election.peer_states import Answers, PeerStates
from agents.election.process import Regrouping


class PlayedPeer:
    """Answers at once, or when the test lets it."""

    def __init__(self, node: str, **fields: Any) -> None:
        self.state = NodeState(node=node, part="active", **fields)
        self.can_answer, self.is_away = threading.Event(), False
        self.can_answer.set()

    def ask(self, kind: str, **args: Any) -> dict[str, Any]:
        assert kind == "state"
        self.can_answer.wait(20)
        if self.is_away:
            raise PeerError(f"{self.state.node} does not answer: timed out")
        return to_wire(self.state)


@pytest.fixture
def peers() -> dict[str, Any]:
    return {"b": PlayedPeer("b", step=7), "c": PlayedPeer("c", step=7)}


def test_a_silent_node_delays_no_answer_and_is_silent_once_it_had_its_time(peers) -> None:
    others = PeerStates(peers)
    peers["c"].can_answer.clear()
    peers["c"].is_away = True
    began_s = time.monotonic()
    first = others.look(0.05)
    assert time.monotonic() - began_s < 5
    assert (set(first.states), first.silent) == ({"b"}, frozenset()), "c may still answer"
    peers["b"].state = NodeState(node="b", part="active", step=8)
    assert others.look(0.05).states["b"].step == 8, "who answered is asked again"
    peers["c"].can_answer.set()
    assert others.look().silent == {"c"}
    peers["c"].is_away = False
    assert others.look() == Answers({"b": peers["b"].state, "c": peers["c"].state}, frozenset())
    # A slow answer takes nothing away: what was said before counts until it fails.
    peers["c"].can_answer.clear()
    assert set(others.look(0.05).states) == {"b", "c"}
    others.forget()
    assert set(others.look(0.05).states) == {"b"}
    peers["c"].can_answer.set()
    others.close()


def test_the_others_go_on_without_a_node_only_once_it_is_silent(monkeypatch) -> None:
    nodes = ("a", "b", "c")
    own = NodeState(node="a", part="active", waits=True, step=7)
    attempt = SimpleNamespace(number=1, file=Path)
    part = SimpleNamespace(node="a", nodes=nodes, attempt=attempt, beliefs=None)
    answers, did = Answers({}, frozenset()), []
    others = SimpleNamespace(look=lambda patience_s: answers, forget=lambda: None)
    monkeypatch.setattr(regrouping, "read_regroup", lambda attempt: None)
    monkeypatch.setattr(Regrouping, "_carry_out", lambda self, nodes, generation: did.append(nodes))
    monkeypatch.setattr(Regrouping, "_give_up", lambda self: did.append("given up"))
    said: list[str] = []
    watch = Regrouping(part, others, said.append)  # type: ignore[arg-type]
    training = NodeState(node="b", part="active", step=6)
    waiting = NodeState(node="b", part="active", waits=True, step=7)

    answers = Answers({"b": training}, frozenset())
    watch.look(own, 0.0)
    answers = Answers({"b": waiting}, frozenset())
    for now_s in (4.0, 7.0):  # c may still answer, and a majority waits: that is no reason to end
        watch.look(own, now_s)
    assert did == []
    answers = Answers({"b": waiting}, frozenset({"c"}))
    watch.look(own, 7.1)
    assert did == [("a", "b")]

    # Too few are left: whoever is missing gets a moment, and no more.
    watch.look(NodeState(node="a", part="active"), 8.0)
    answers = Answers({}, frozenset({"b", "c"}))
    for now_s in (9.0, 13.0):
        watch.look(own, now_s)
    assert did == [("a", "b")]
    watch.look(own, 14.1)
    assert did == [("a", "b"), "given up"]
    assert "too few of the run's nodes are left" in said[-1]

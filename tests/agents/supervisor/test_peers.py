"""A node that has gone is named by the nodes that waited for it, without a master."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agents.contract import run_layout
from agents.supervisor import outages
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.launch import launch
from agents.supervisor.outages import find_silent_peers
from agents.supervisor.verdict import AttemptOutcome, name_lost_nodes
from tests.agents.supervisor.conftest import Node

DEAD = "127.0.0.9"
NOWHERE = "224.0.0.1"
"""A multicast address, to which no connection can be made."""


@pytest.fixture
def dead_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port of DEAD that answers nobody: the queue of its listener is full."""
    monkeypatch.setattr(outages, "PROBE_TIMEOUT_S", 0.5)
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.socket())
        door.bind((DEAD, 0))
        door.listen(0)
        for _ in range(4):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(door.getsockname())
        monkeypatch.setattr(outages, "SSH_PORT", door.getsockname()[1])
        yield door.getsockname()[1]


def test_only_the_node_without_any_answer_is_silent(node: Node, dead_port: int) -> None:
    intent = replace(node.intent("train"), master_port=dead_port)
    addresses = {"a": DEAD, "b": DEAD, "c": "127.0.0.3"}  # c refuses, and a is this node
    assert find_silent_peers(replace(intent, addresses=addresses)) == ("b",)
    with socket.create_server(("127.0.0.4", 0)) as taker:
        intent = replace(intent, master_port=taker.getsockname()[1])
        assert find_silent_peers(replace(intent, addresses={"d": "127.0.0.4"})) == ()


def test_node_that_is_gone_while_ranks_load_ends_them_within_its_timeout(node: Node) -> None:
    intent = node.intent("load", elsewhere=1)
    changes = {"addresses": {"b": NOWHERE}, "outage_s": 2.0}
    launch(node.home, replace(intent, **changes))  # type: ignore[arg-type]
    ended = node.wait_end(AttemptFolder(node.home, intent.run_id, intent.attempt), 25.0)
    assert (ended.state, ended.cause, ended.peer_lost) == ("failed", "peer_lost", True)
    assert ended.lost_nodes == ("b",)
    assert ended.message.startswith("Node b has not answered for ")
    assert ended.message.endswith("while the ranks on node a load (rank 0 in phase loading).")


def test_part_that_has_ended_elsewhere_ends_ranks_that_load(node: Node) -> None:
    intent = node.intent("load", elsewhere=1)
    launch(node.home, intent)
    attempt = AttemptFolder(node.home, intent.run_id, intent.attempt)
    node.wait(attempt, lambda status: any(rank.phase for rank in status.ranks))
    ended = {"node": "b", "reason": "Rank 1 on node b (cpu) was ended by SIGKILL."}
    attempt.file(run_layout.ENDED_PEER_FILE).write_text(json.dumps(ended))
    status = node.wait_end(attempt)
    assert (status.state, status.cause, status.peer_lost) == ("failed", "peer_lost", True)
    assert status.message == f"The part of node b has ended: {ended['reason']}"


def test_master_of_an_earlier_version_named_no_addresses(node: Node) -> None:
    assert find_silent_peers(node.intent("train", elsewhere=1)) == ()


def test_silent_nodes_are_named_in_the_end_of_the_attempt(node: Node) -> None:
    lost = AttemptOutcome(state="failed", message="It lost its peer.", peer_lost=True)
    assert name_lost_nodes(lost, ()) == lost
    named = name_lost_nodes(lost, ("b", "c"))
    assert named.message == "It lost its peer. Node b and c do not answer."
    attempt = node.launch("finish")
    node.wait_end(attempt)
    ended = json.loads(attempt.file("exit.json").read_text())
    attempt.file("exit.json").write_text(json.dumps({**ended, "lost_nodes": named.lost_nodes}))
    assert read_status(attempt).lost_nodes == ("b", "c")

"""Three nodes of one PC with an attempt, and no master."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
import time
from dataclasses import replace

import pytest

from agents.contract.election import Closing
from agents.contract.mandate import closing_bytes
from agents.contract.run import AttemptIntent, AttemptLoss
from agents.contract.run_layout import CLOSED_FILE, INTENT_FILE
from agents.contract.wire import to_wire
from agents.election.channel import Listener, Peer, PeerError
from agents.election.part import Part
from agents.election.process import ElectionWatch
from agents.node.checkpoints import verify
from agents.state import write_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.election_process import close, keep
from agents.supervisor.fence import claim_attempt
from agents.supervisor.stop import stop
from app.nodes.credential import make_credential
from tests.agents.election.conftest import RUN, Nodes
from tests.agents.supervisor.conftest import kill_supervisor


@pytest.mark.parametrize("is_signed", [True, False])
def test_two_of_three_nodes_go_on_and_the_third_finds_nothing_to_start(
    nodes: Nodes, is_signed: bool
) -> None:
    nodes.is_signed = is_signed
    nodes.launch()
    for name in "abc":
        nodes.wait(name, 1, lambda status: any((rank.step or 0) >= 60 for rank in status.ranks))
    for name, step in (("a", 20), ("b", 20), ("b", 40), ("b", 60), ("c", 20)):
        nodes.add_checkpoint(name, step)
    damaged = nodes.home("b").checkpoints("run-1") / "step-00000060" / "state.json"
    damaged.write_text("{}")
    nodes.lose("a")
    found = nodes.wait("b", 2, lambda status: status.is_confirmed and status.state == "running")
    other = nodes.wait("c", 2, lambda status: status.is_confirmed and status.state == "running")
    assert [(place.rank, place.node) for place in found.all_ranks] == [(0, "b"), (1, "c")]
    assert other.all_ranks == found.all_ranks
    plan = found.election
    assert plan is not None
    assert plan.started_by == "b", "the first of those that are left"
    assert plan.reason == "a was lost; no master asked for 1 s"
    assert [loss.attempt for loss in plan.losses] == [1]
    assert plan.losses[0].step >= 2
    intent = nodes.attempt("b", 2).read_intent()
    assert intent is not None
    assert (intent.master_address, intent.resume_step) == (nodes.address("b"), 40)
    assert verify(nodes.home("c"), "run-1", 40).verified, "copied from the node that had it"
    assert not damaged.exists(), "no node keeps what is newer than the start"
    assert set(intent.addresses) == {"b", "c"}
    # The processes of the old attempt are gone, and nothing of it listens.
    nodes.wait_gone("b", "c")
    assert not nodes.attempt("a", 2).folder.exists()


def test_the_rank_that_was_killed_is_named_and_not_those_that_lost_it(nodes: Nodes) -> None:
    nodes.launch(least_step=20)
    for name in nodes.names:
        nodes.add_checkpoint(name, 20)
    (rank,) = read_status(nodes.attempt("c", 1)).ranks
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)
    killed_s = time.time()
    nodes.lose()
    found = nodes.wait("a", 2, lambda status: status.is_confirmed and status.state == "running")
    plan = found.election
    assert plan is not None
    (loss,) = plan.losses
    assert loss.cause == "killed"
    assert loss.reason.startswith("Rank 2 on node c (cpu) was ended by SIGKILL")
    assert "in phase training" in loss.reason
    assert abs(loss.ended_s - killed_s) < 5, "when it ended, not when the nodes went on"
    assert plan.reason == f"{loss.reason}; no master asked for 1 s"


def test_ranks_that_load_end_when_a_part_elsewhere_has_ended_and_all_start_again(
    nodes: Nodes,
) -> None:
    """They would wait in the rendezvous, and no master is there to stop them."""
    nodes.behaviour = "load"
    nodes.launch(least_step=0)
    status = nodes.wait("c", 1, lambda status: any(rank.phase for rank in status.ranks))
    (rank,) = status.ranks
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)
    for name in ("a", "b"):
        ended = nodes.wait(name, 1, lambda status: status.state == "failed")
        assert ended.peer_lost
        assert ended.message.startswith("The part of node c has ended: Rank 2 on node c (cpu) was")
        assert "SIGKILL" in ended.message
        assert "in phase loading" in ended.message
    found = nodes.wait("b", 2, lambda status: status.is_confirmed and status.state == "running")
    assert len(found.all_ranks) == 3


def test_a_minority_parks(nodes: Nodes) -> None:
    nodes.launch()
    nodes.lose("a", "b")
    time.sleep(6.0)
    assert "waiting: too few of the run's nodes can be reached" in nodes.say("c")
    assert not nodes.attempt("c", 2).folder.exists()


def test_a_master_that_asks_a_stop_and_a_closed_loss_keep_nodes_from_starting(nodes: Nodes) -> None:
    nodes.launch()
    nodes.lose("a")
    for _ in range(10):
        keep(nodes.attempt("b", 1))
        time.sleep(0.5)
    assert not nodes.attempt("b", 2).folder.exists(), "one node with a master holds both back"
    word = nodes.sign_as_master(closing_bytes(RUN, 1))
    close(nodes.attempt("c", 1), "a person stopped it", Closing(signature=word))
    nodes.wait_gone("b", "c")
    assert not nodes.attempt("b", 2).folder.exists()


def test_a_run_that_is_stopped_leaves_nothing_that_listens(nodes: Nodes) -> None:
    nodes.launch()
    intent = nodes.attempt("a", 1).read_intent()
    assert intent is not None
    assert intent.election is not None
    place = (intent.address, intent.election.ports["a"])
    socket.create_connection(place, 5).close()
    # The same port of another address of this PC: it listens on one interface alone.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((nodes.address("c"), place[1]), 5)
    for name in nodes.names:
        stop(nodes.attempt(name, 1), 2.0)
        assert nodes.helper(name) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, 5)


def test_ranks_whose_supervisor_and_recorder_are_gone_get_a_supervisor(nodes: Nodes) -> None:
    nodes.launch()
    before = nodes.attempt("b", 1).read_supervisor()
    assert before is not None
    kill_supervisor(nodes.attempt("b", 1))
    found = nodes.wait("b", 1, lambda status: status.supervisor_pid not in (None, before.pid))
    assert found.state == "running"


def test_who_has_another_credential_or_none_gets_no_answer(nodes: Nodes) -> None:
    nodes.launch()
    intent = nodes.attempt("a", 1).read_intent()
    assert intent is not None
    assert intent.election is not None
    ours = nodes.peer("b", "a")
    assert ours.ask("state")["part"] == "active"
    assert ours.ask("claim", attempt=2)["is_granted"] is False, "while its ranks live"
    with pytest.raises(PeerError, match="no request"):
        ours.ask("delete_all")
    with pytest.raises(PeerError, match=r"does not answer|closed"):
        replace(ours, credential=make_credential()).ask("state")
    assert not is_answered((ours.address, ours.port))


def is_answered(place: tuple[str, int]) -> bool:
    """Return whether one who shows no certificate gets an answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(place, 5) as plain, context.wrap_socket(plain) as channel:
            channel.sendall(b'{"kind": "state"}\n')
            return bool(channel.recv(100))
    except OSError:
        return False


def test_a_node_that_launches_last_answers_until_it_is_confirmed(nodes: Nodes) -> None:
    nodes.patience_s = 0.1
    intents = {intent.node: intent for intent in nodes.intents()}
    for name in "bc":
        write_intent(nodes.attempt(name, 1), intents[name])
    first = Part(nodes.attempt("b", 1), intents["b"])
    assert claim_attempt(nodes.home("b"), RUN, 2, replaces=1).is_granted
    write_intent(nodes.attempt("b", 2), nodes.prove(replace(intents["b"], attempt=2)))
    assert first.state().part == "closed", "it has launched its own part"
    ports = first.plan.ports
    listener = Listener(
        nodes.address("b"), ports["b"], nodes.credential, first.answer, first.member
    )
    # The last one has granted the number, and its part is still to be launched.
    last = Part(nodes.attempt("c", 1), intents["c"])
    assert last.state().part == "lost"
    time.sleep(0.2)  # no master asks
    assert last.state().is_ready
    assert last.ask("claim", {"attempt": 2}, "b")["is_granted"]
    watch = threading.Thread(target=ElectionWatch(last).run)
    watch.start()
    peer = Peer("c", nodes.address("c"), ports["c"], nodes.credential, nodes.member("b"))
    time.sleep(1.5)
    write_intent(nodes.attempt("c", 2), nodes.prove(replace(intents["c"], attempt=2)))
    time.sleep(0.5)
    assert peer.ask("confirm", attempt=2) == {}
    watch.join(5.0)
    assert not watch.is_alive(), "nothing is left to answer for"
    assert nodes.attempt("c", 1).file(CLOSED_FILE).exists()
    listener.close()


def write_intent(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    """Record a launch of which no process is left."""
    attempt.folder.mkdir(parents=True, exist_ok=True)
    write_json(attempt.file(INTENT_FILE), to_wire(intent))


def test_limits_hold_as_for_a_master(nodes: Nodes) -> None:
    def is_within_limits(*losses: AttemptLoss) -> bool:
        nodes.plan = {"losses": losses}
        intent = nodes.intents()[1]
        attempt = nodes.attempt("b", 1)
        write_intent(attempt, intent)
        return ElectionWatch(Part(attempt, intent))._is_within_limits(7, time.monotonic())

    def loss(step: int, ago_s: float = 4000.0) -> AttemptLoss:
        now_s = time.time()
        return AttemptLoss(attempt=1, step=step, ended_s=now_s, resumed_s=now_s - ago_s)

    assert is_within_limits()
    assert is_within_limits(loss(7))
    assert is_within_limits(loss(6), loss(7))
    assert not is_within_limits(loss(6, ago_s=10.0)), "a second loss within an hour waits"
    assert not (nodes.attempt("b", 1).file("closed.json")).exists()
    assert not is_within_limits(loss(7), loss(7)), "the third loss at one step"
    assert "lost 3 times at step 7" in nodes.attempt("b", 1).file("closed.json").read_text()

"""Nodes whose ranks lost others and wait: who goes on, and who never does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.election import ClaimAnswer, NodeState, is_majority
from agents.contract.regroup import Regroup, decide_regroup, may_regroup
from agents.contract.run_layout import (
    ELECTION_FILE,
    INTERRUPT_FILE,
    REGROUP_FILE,
    SUPERVISOR_JOURNAL,
)
from agents.contract.spec import CheckpointSpec
from agents.contract.wire import to_wire
from agents.election.channel import PeerError
from agents.election.part import Part
from agents.election.proposal import Proposal, RefusedError
from agents.state import identity_from, read_json
from agents.supervisor.attempt import read_journal, read_regroup
from agents.supervisor.fence import claim_attempt
from agents.supervisor.ownership import OwnershipWatch
from agents.supervisor.regrouping import RegroupWatch
from agents.supervisor.sweep import find_processes
from tests.agents.contract.test_election import NAMES, partitions
from tests.agents.election.conftest import RUN, Nodes

BACK_S = 5.0
"""Longest time from a loss to the next step of those that are left, in seconds."""


def waiting(node: str, **changes: object) -> NodeState:
    fields: dict[str, object] = {"part": "active", "waits": True, "step": 7, **changes}
    return NodeState(node=node, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_of_every_partition_one_group_goes_on_and_one_node_of_it_decides(count: int) -> None:
    nodes = NAMES[:count]
    for groups in partitions(nodes):
        deciding = {
            node: found.nodes
            for group in groups
            for node in group
            if (found := decide_regroup(node, nodes, {n: waiting(n) for n in group}, 1)).act
            == "propose"
        }
        may = [group for group in groups if is_majority(group, nodes) and len(group) > 1]
        assert deciding == ({may[0][0]: may[0]} if may else {})


def test_what_else_keeps_ranks_from_going_on() -> None:
    a, b, c = waiting("a"), waiting("b"), NodeState(node="c", part="lost")

    def decide(*states: NodeState) -> tuple[str, bool]:
        known = {state.node: state for state in states}
        found = decide_regroup("a", ("a", "b", "c"), known, 1)
        return found.act, found.is_certain

    assert decide(a, b, c) == ("propose", True)
    assert decide(a, b) == ("propose", False), "c may answer soon"
    assert decide(a, b, replace(c, part="active", has_lost_rank=True)) == ("propose", True)
    # It computes, and notices the loss at the end of its step.
    assert decide(a, b, replace(c, part="active"))[0] == "wait"
    assert decide(a, c)[0] == "wait", "b may answer soon"
    assert decide(a, replace(b, part="lost", waits=False), c)[0] == "give_up"
    assert decide(a, replace(b, step=8), c)[0] == "give_up", "their states differ"
    assert decide(a, replace(b, generation=1), c)[0] == "give_up", "they went on without this one"
    assert decide(a, replace(b, fence=1), c)[0] == "propose"
    assert decide(a, replace(b, fence=2), c)[0] == "give_up", "a newer attempt was promised"
    assert decide(a, b, replace(c, part="closed"))[0] == "give_up", "its failure would come again"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, ("a", "b", "c"), patience_s=60.0)
    made.behaviour, made.environ = "regroup", {"RACKLESS_STALL_S": "1"}
    made.launch()
    yield made
    made.end()


def kill(nodes: Nodes, name: str, *, with_helper: bool = True) -> None:
    """Let a node lose power, or its ranks alone; the ranks of the others notice."""
    attempt = nodes.attempt(name, 1)
    helper = identity_from(read_json(attempt.file(ELECTION_FILE))) if with_helper else None
    for pid in [*find_processes(attempt.tag), *([helper.pid] if helper else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    nodes.cut.touch()


def wait_generation(nodes: Nodes, name: str, generation: int, step: int) -> None:
    def is_there(status) -> bool:
        return status.generation == generation and all((r.step or 0) > step for r in status.ranks)

    nodes.wait(name, 1, is_there)


def test_the_living_go_on_in_the_same_attempt_and_the_lost_one_stays_out(nodes: Nodes) -> None:
    for name in ("b", "c"):
        nodes.wait(name, 1, lambda status: any(rank.step == 5 for rank in status.ranks))
    kill(nodes, "a")
    lost_s = time.monotonic()
    for name in ("b", "c"):
        wait_generation(nodes, name, 1, 5)
    assert time.monotonic() - lost_s < BACK_S
    for name in ("b", "c"):
        status = nodes.wait(name, 1, lambda status: True)
        assert (status.state, status.members) == ("running", ("b", "c"))
        assert not nodes.attempt(name, 2).folder.exists()
    # Whoever asks again, for the same group or for one of others, is refused: one trains.
    intent = nodes.attempt("b", 1).read_intent()
    assert intent is not None
    assert intent.election is not None
    assert may_regroup(intent)
    peer = nodes.peer("a", "b")
    wanted = Regroup(generation=2, nodes=("a", "b"), address="127.0.0.1", port=1)
    for asked in (wanted, replace(wanted, generation=1)):
        with pytest.raises(PeerError, match=r"do not wait for generation|leaves out c"):
            peer.ask("regroup", **to_wire(asked))
    # A minority that returns cannot recover what the majority trains.
    assert peer.ask("claim", attempt=2)["is_granted"] is False


def test_one_rank_that_is_killed_takes_its_node_out(nodes: Nodes) -> None:
    attempt = nodes.attempt("c", 1)
    (row,) = (read_json(attempt.file("started.json")) or {})["ranks"]
    os.kill(row["pid"], signal.SIGKILL)
    nodes.cut.touch()
    for name in ("a", "b"):
        wait_generation(nodes, name, 1, 5)
    assert nodes.wait("c", 1, lambda status: status.state == "failed").cause == "killed"


def test_a_killed_process_is_started_again_so_that_survivors_regroup(nodes: Nodes) -> None:
    killed = nodes.helper("b")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    nodes.wait_gone("b")
    watch = OwnershipWatch(nodes.home("b"))
    watch.look()
    nodes.wait("b", 1, lambda status: nodes.helper("b") not in (None, killed))
    restarted = nodes.helper("b")
    watch.look()
    assert nodes.helper("b") == restarted, "there is one"
    kill(nodes, "a")
    for name in ("b", "c"):
        wait_generation(nodes, name, 1, 5)


def test_ranks_that_wait_for_a_silent_node_are_freed_by_their_supervisor(nodes: Nodes) -> None:
    attempt = nodes.attempt("c", 1)
    half = nodes.cut.with_name("half")
    half.write_text("silent")
    half.rename(nodes.cut)  # ranks that see it empty would notice the loss
    kill(nodes, "c")
    for name in ("a", "b"):
        wait_generation(nodes, name, 1, 5)
        asked = read_json(nodes.attempt(name, 1).file(INTERRUPT_FILE)) or {}
        assert asked["generation"] == 0
        # Ranks that have left their group stand still as before, until they are in another one.
        decided_s = nodes.attempt(name, 1).file(REGROUP_FILE).stat().st_mtime
        lines = read_journal(nodes.attempt(name, 1).file(SUPERVISOR_JOURNAL))
        moved_s = [line["time_s"] for line in lines if line["kind"] == "moving"]
        assert all(time_s >= decided_s for time_s in moved_s)
        assert [line["rank"] for line in lines if line["kind"] == "standing"]
    assert find_processes(attempt.tag) == []


def test_the_supervisor_asks_once_and_then_knows_who_is_left(nodes: Nodes) -> None:
    attempt = nodes.attempt("a", 1)
    intent = attempt.read_intent()
    assert intent is not None
    watch = RegroupWatch(attempt, intent)
    assert not watch.look()
    assert [watch.interrupt(), watch.interrupt()] == [True, False]
    attempt.file(INTERRUPT_FILE).unlink()
    kill(nodes, "c")
    wait_generation(nodes, "a", 1, 5)
    assert [watch.look(), watch.look()] == [True, False]
    assert set(watch.intent.addresses) == {"a", "b"}, "nobody waits for c any more"
    assert watch.interrupt(), "the new group may lose a node too"
    other = RegroupWatch(attempt, replace(intent, spec=replace(intent.spec, recovery="resume")))
    assert not other.interrupt()


def test_a_newer_attempt_that_was_promised_is_stronger_than_a_group(nodes: Nodes) -> None:
    # A master has claimed it on one of two nodes, so the other one alone must not go on either.
    assert claim_attempt(nodes.home("b"), RUN, 2, replaces=1).is_granted
    kill(nodes, "a")
    for name in ("b", "c"):
        found = nodes.wait(name, 1, lambda status: status.state == "failed", 30)
        assert found.cause == "peer_lost"
    assert read_regroup(nodes.attempt("b", 1)) is None


def test_a_minority_saves_and_ends(nodes: Nodes) -> None:
    kill(nodes, "a", with_helper=False)
    kill(nodes, "b", with_helper=False)
    found = nodes.wait("c", 1, lambda status: status.state == "failed")
    assert found.cause == "peer_lost"
    assert "too few of the run's nodes are left" in nodes.say("c")


def test_a_recovery_after_a_regrouping_needs_one_who_wrote_since(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, ("a", "b", "c"))
    intent = nodes.intents()[2]
    spec = replace(intent.spec, checkpoint=CheckpointSpec(copies=1))
    intent = replace(intent, spec=spec, checkpoint_ranks=(0,))
    proposal = Proposal(Part(nodes.attempt("c", 1), intent), {})
    before = ClaimAnswer(is_granted=True, fence=2)
    since = replace(before, generation=1, members=("b", "c"))
    proposal._require_writer({"a": before, "c": before})
    # Then b wrote: what a has is from before, and training would be done again.
    with pytest.raises(RefusedError, match="the checkpoints are on b"):
        proposal._require_writer({"a": before, "c": since})
    proposal._require_writer({"b": since, "c": since})

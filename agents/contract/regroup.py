"""How the nodes of an attempt go on in living processes after a rank or a node was lost.

Ranks that lose another one leave their group and wait, with model and optimizer in memory. The
processes beside the supervisors (`agents/election`) then agree which nodes go on: those whose ranks
all wait at one step, if they are a majority of the attempt's nodes. The lowest one asks each of
them, by one more request on their channel:

    regroup  Regroup                     -> {}; the ranks of this node join that group

A group trains only once all of its ranks have joined it, and a rank is in one group at a time. Two
majorities share a node, so two groups of an attempt can never train at once; and a node that has
promised a newer attempt to anyone joins no group of this one any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agents.contract.election import NodeState, is_majority
from agents.contract.names import check_name, check_number, check_text
from agents.contract.parallel import find_mode
from agents.contract.run import MAX_GENERATION, MAX_PORT, AttemptIntent


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup:
    """The ranks that go on, and where they meet."""

    generation: int
    """How often survivors of this attempt have regrouped, this time included."""
    nodes: tuple[str, ...]
    """Nodes that go on, in the order of ranks."""
    address: str
    port: int
    """Address of the first of them, and a port there for the ranks' store."""

    def check_foreign(self) -> None:
        check_number("generation", self.generation, 1, MAX_GENERATION)
        for node in self.nodes:
            check_name("nodes", node)
        check_text("address", self.address)
        check_number("port", self.port, 1, MAX_PORT)


def may_regroup(intent: AttemptIntent) -> bool:
    """Return whether nodes of this attempt decide on new groups.

    They have to know each other, and each rank has to hold the whole state.
    """
    spec = intent.spec
    is_whole = find_mode(intent.parallel).keeps_whole_state and spec.compression == "none"
    knows_others = intent.election is not None and bool(intent.credential)
    return spec.recovery == "auto" and is_whole and knows_others


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupDecision:
    """What a node does next whose ranks wait. `give_up`: they save what they hold, and end."""

    act: Literal["wait", "give_up", "propose"]
    nodes: tuple[str, ...] = ()
    """Nodes of the next group, in the order of ranks."""
    is_certain: bool = True
    """Whether every node that matters has answered; one that has not may do so soon."""
    reason: str = ""


def decide_regroup(
    me: str, nodes: Sequence[str], states: dict[str, NodeState], attempt: int
) -> RegroupDecision:
    """Decide what a node does whose ranks have lost others and wait. Pure.

    Args:
        me: name of the node.
        nodes: all nodes of the attempt, in the order of ranks.
        states: state of each node that answers, its own included.
        attempt: number of the attempt.
    """
    mine = states[me]
    answering = [states[node] for node in nodes if node in states]
    if any(state.generation > mine.generation for state in answering):
        return RegroupDecision(act="give_up", reason="the others have gone on without this node")
    if any(state.fence > attempt for state in answering):
        return RegroupDecision(act="give_up", reason="a newer attempt was promised to someone")
    for state in answering:
        if state.part == "closed":
            return RegroupDecision(act="give_up", reason=state.reason or f"{state.node} has ended")
    waiting = tuple(s.node for s in answering if s.waits and s.generation == mine.generation)
    if any(s.part == "active" and not s.waits and not s.has_lost_rank for s in answering):
        # Its ranks compute, and notice the loss at the end of their step.
        return RegroupDecision(act="wait", reason="another node still trains")
    is_certain = len(answering) == len(nodes)
    if len(waiting) < 2 or not is_majority(waiting, nodes):
        act: Literal["wait", "give_up"] = "give_up" if is_certain else "wait"
        reason = "too few of the run's nodes are left"
        return RegroupDecision(act=act, reason=reason, is_certain=is_certain)
    if len({states[node].step for node in waiting}) > 1:
        return RegroupDecision(act="give_up", reason="the ranks that are left are at unlike steps")
    if waiting[0] != me:
        return RegroupDecision(act="wait", reason=f"{waiting[0]} decides")
    return RegroupDecision(act="propose", nodes=waiting, is_certain=is_certain)

"""Regrouping: nodes of an attempt continue in their living processes after the loss of others.

Ranks that lose another rank leave their group and wait, with model and optimizer in memory. The
election processes (`agents/election`) then agree which nodes continue: those whose ranks all wait
at one step, if they are a majority of the attempt's nodes. The first of these nodes asks the
others, by one more request on their channel:

    regroup  Regroup                     -> {}; the ranks of this node join that group

A group trains only after all of its ranks have joined it, and a rank is in one group at a time. Two
majorities share a node, so two groups of an attempt can never train at once. A node that has
granted a newer attempt joins no further group of this one.
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
    """Ranks that continue, and their meeting point."""

    generation: int
    """Number of regroupings of this attempt, this one included."""
    nodes: tuple[str, ...]
    """Nodes that continue, in rank order."""
    address: str
    port: int
    """Port at `address`, that of the first node, for the ranks' store."""

    def check_foreign(self) -> None:
        check_number("generation", self.generation, 1, MAX_GENERATION)
        for node in self.nodes:
            check_name("nodes", node)
        check_text("address", self.address)
        check_number("port", self.port, 1, MAX_PORT)


def may_regroup(intent: AttemptIntent) -> bool:
    """Return whether nodes of this attempt may form new groups.

    They must know each other, and each rank must hold the whole state.
    """
    spec = intent.spec
    # Lossy compression leaves a residual on each rank, which is lost with the rank.
    is_whole = find_mode(intent.parallel).keeps_whole_state and spec.compression == "none"
    knows_others = intent.election is not None and bool(intent.credential)
    return spec.recovery == "auto" and is_whole and knows_others


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupDecision:
    """Next action of a node whose ranks wait. `give_up`: they save their state and end."""

    act: Literal["wait", "give_up", "propose"]
    nodes: tuple[str, ...] = ()
    """Nodes of the next group, in rank order."""
    is_certain: bool = True
    """True if every relevant node has answered; False if a silent one may still answer."""
    reason: str = ""


def decide_regroup(
    me: str, nodes: Sequence[str], states: dict[str, NodeState], attempt: int
) -> RegroupDecision:
    """Decide the next action of a node whose ranks have lost others and wait. Pure.

    Args:
        me: name of the node.
        nodes: all nodes of the attempt, in rank order.
        states: state of each reachable node, its own included.
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
    # Half of the nodes is a majority if it has rank 0, but a single node is not a group.
    if len(waiting) < 2 or not is_majority(waiting, nodes):
        act: Literal["wait", "give_up"] = "give_up" if is_certain else "wait"
        reason = "too few of the run's nodes are left"
        return RegroupDecision(act=act, reason=reason, is_certain=is_certain)
    if len({states[node].step for node in waiting}) > 1:
        return RegroupDecision(act="give_up", reason="the ranks that are left are at unlike steps")
    if waiting[0] != me:
        return RegroupDecision(act="wait", reason=f"{waiting[0]} decides")
    return RegroupDecision(act="propose", nodes=waiting, is_certain=is_certain)

"""Bring the ranks together that are left after a loss, while their processes live.

Each node whose ranks wait asks the others what they know. Once all that still count wait at one
step, the lowest of them asks each one to join a new group of the same attempt. A node is left out
once it gave no answer in the time for one, and the others have been the same for a moment. After
`PATIENCE_S` the ranks save and end, and the attempt is recovered as any other one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from agents.contract.election import NodeState
from agents.contract.regroup import Regroup, decide_regroup
from agents.contract.wire import WireError, to_wire
from agents.election.channel import PeerError
from agents.election.part import Part
from agents.election.peer_states import Answers, PeerStates
from agents.errors import ExpectedError
from agents.node.probes import choose_port
from agents.supervisor.attempt import read_regroup
from agents.supervisor.regrouping import give_up

PATIENCE_S = 20.0
"""Time for ranks that wait until they are together again, in seconds."""
LOOK_S = 0.5
"""Time for answers in one look, in seconds; a node that takes longer counts in a later one."""
SETTLE_S = 1.5
"""Time for which the same ranks have to wait before they go on without silent nodes, in seconds."""
ALONE_S = 5.0
"""Time for silent nodes without which the ranks cannot go on, in seconds."""
JOIN_TIMEOUT_S = 8.0
"""Time for a node's answer to the request to join, in seconds: more than it waits for a lock."""


class Regrouping:
    """What one node does while its ranks wait."""

    def __init__(
        self,
        part: Part,
        others: PeerStates,
        say: Callable[[str], None],
    ) -> None:
        self._part = part
        self._others = others
        self._say = say
        self._since_s: float | None = None
        self._members: tuple[str, ...] = ()
        self._members_since_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether ranks of this node wait."""
        return self._since_s is not None

    def look(self, own: NodeState, now_s: float) -> None:
        """Do what is due for ranks in the state `own`."""
        if not own.waits:
            self._since_s, self._members = None, ()
            return
        if self._since_s is None:
            self._since_s = now_s
            self._others.forget()
        joined = read_regroup(self._part.attempt)
        if joined is not None and joined.generation > own.generation:
            return  # the ranks are on their way, or fail and end
        part, answers = self._part, self._others.look(LOOK_S)
        states = {own.node: own, **answers.states}
        found = decide_regroup(own.node, part.nodes, states, part.attempt.number)
        if found.nodes != self._members:
            self._members, self._members_since_s = found.nodes, now_s
        lacks_others = found.act == "wait" and not found.is_certain
        patience_s = ALONE_S if lacks_others else PATIENCE_S
        if found.act == "give_up" or now_s - self._since_s >= patience_s:
            self._say(f"the ranks do not regroup: {found.reason or 'it took too long'}")
            self._give_up()
        elif found.act == "wait":
            self._say(f"regrouping waits: {found.reason}")
        elif found.is_certain or self._are_away(states, answers, now_s):
            self._carry_out(found.nodes, own.generation + 1)

    def _are_away(self, states: dict[str, NodeState], answers: Answers, now_s: float) -> bool:
        """Return whether the nodes that have not answered can be left out."""
        missing = set(self._part.nodes) - states.keys()
        return missing <= answers.silent and now_s - self._members_since_s >= SETTLE_S

    def _carry_out(self, nodes: tuple[str, ...], generation: int) -> None:
        """Ask all nodes to join, this one last; none joins if one refuses that was asked before."""
        part = self._part
        wanted = Regroup(
            generation=generation,
            nodes=nodes,
            address=part.intent.address,
            port=choose_port(part.intent.address),
        )
        others = [part.peers[node] for node in nodes if node != part.node]
        try:
            with ThreadPoolExecutor(len(others)) as pool:
                asked = [
                    pool.submit(peer.ask, "regroup", JOIN_TIMEOUT_S, **to_wire(wanted))
                    for peer in others
                ]
            for one in asked:
                one.result()
            part.ask("regroup", to_wire(wanted))
        except (PeerError, ExpectedError, WireError) as error:
            self._say(f"not regrouped: {getattr(error, 'message', error)}")
            self._give_up()
            return
        self._say(f"generation {generation} goes on with {', '.join(nodes)}")

    def _give_up(self) -> None:
        with contextlib.suppress(ExpectedError):  # a full disk: they end after a while
            give_up(self._part.attempt)

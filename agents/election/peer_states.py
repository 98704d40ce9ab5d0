"""What the other nodes of an attempt say of themselves, asked side by side.

A node behind a cut cable answers nothing until its time is over. Who waits for all of them would
learn what the others say only then, seconds later for each look.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from agents.contract.election import NodeState
from agents.contract.wire import WireError, from_wire
from agents.election.channel import Peer, PeerError

CONNECT_TIMEOUT_S = 2.0
"""Time to open a connection, which the kernel answers however loaded a node is, in seconds."""


@dataclass(frozen=True)
class Answers:
    """What was found out in one look."""

    states: dict[str, NodeState]
    """Newest state of each node whose last answer came, by its name."""
    silent: frozenset[str]
    """Nodes whose last answer did not come in the time for one; a new one may be on its way."""


class PeerStates:
    """Asks each node again as soon as it has answered, or has failed to."""

    def __init__(self, peers: Mapping[str, Peer]) -> None:
        self._peers = peers
        # Twice as many: what was asked before `forget` may still take its time.
        self._pool = ThreadPoolExecutor(max(1, 2 * len(peers)))
        self._asked: dict[str, Future[NodeState | None]] = {}
        self._known: dict[str, NodeState | None] = {}

    def look(self, patience_s: float | None = None) -> Answers:
        """Return what the nodes say; those that have not answered by then are asked on.

        Args:
            patience_s: time to wait for answers, in seconds; None: until each has answered or
                failed to.
        """
        for node, peer in self._peers.items():
            if node not in self._asked:
                self._asked[node] = self._pool.submit(_ask, peer)
        wait(self._asked.values(), patience_s)
        done = [node for node, asked in self._asked.items() if asked.done()]
        self._known.update({node: self._asked.pop(node).result() for node in done})
        states = {node: state for node, state in self._known.items() if state is not None}
        return Answers(states, frozenset(self._known.keys() - states.keys()))

    def forget(self) -> None:
        """Drop what was asked before: a node that was silent then may not be now."""
        self._asked, self._known = {}, {}

    def close(self) -> None:
        """End the threads, once their time for an answer is over."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _ask(peer: Peer) -> NodeState | None:
    try:
        answer = peer.ask("state", connect_timeout_s=CONNECT_TIMEOUT_S)
        return from_wire(NodeState, answer, "state")
    except (PeerError, WireError):
        return None

"""States of the other nodes of an attempt, polled in parallel.

A node behind a cut cable stays silent until the timeout. A poll that waited for it would delay the
answers of all others by seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from agents.contract.election import NodeState
from agents.contract.wire import WireError, from_wire
from agents.election.channel import Peer, PeerError

CONNECT_TIMEOUT_S = 2.0
"""Maximum time to open a connection, in seconds; the kernel accepts it even on a loaded node."""


@dataclass(frozen=True)
class Answers:
    """Result of one poll."""

    states: dict[str, NodeState]
    """Newest state of each node that answered its last request, by node name."""
    silent: frozenset[str]
    """Nodes whose last request timed out; a new request may be pending."""


class PeerStates:
    """Poller that asks each node again once its last request was answered or has failed."""

    def __init__(self, peers: Mapping[str, Peer]) -> None:
        self._peers = peers
        # Two threads per node: a request from before `forget` may still be waiting.
        self._pool = ThreadPoolExecutor(max(1, 2 * len(peers)))
        self._asked: dict[str, Future[NodeState | None]] = {}
        self._known: dict[str, NodeState | None] = {}

    def look(self, patience_s: float | None = None) -> Answers:
        """Return the states of the nodes; pending requests are kept for the next poll.

        Args:
            patience_s: maximum time to wait for answers, in seconds; None waits until each request
                was answered or has failed.
        """
        for node, peer in self._peers.items():
            if node not in self._asked:
                self._asked[node] = self._pool.submit(_ask, node, peer)
        wait(self._asked.values(), patience_s)
        # A pending request is not repeated: its answer may arrive before the next poll.
        done = [node for node, asked in self._asked.items() if asked.done()]
        self._known.update({node: self._asked.pop(node).result() for node in done})
        states = {node: state for node, state in self._known.items() if state is not None}
        return Answers(states, frozenset(self._known.keys() - states.keys()))

    def forget(self) -> None:
        """Drop earlier answers and pending requests: a node that was silent may answer now."""
        self._asked, self._known = {}, {}

    def close(self) -> None:
        """End the threads once their requests are answered or time out."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _ask(node: str, peer: Peer) -> NodeState | None:
    try:
        answer = peer.ask("state", connect_timeout_s=CONNECT_TIMEOUT_S)
        state = from_wire(NodeState, answer, "state")
        return state if state.node == node else None  # it speaks for itself alone
    except (PeerError, WireError):
        return None  # unreachable, or of another version: neither counts

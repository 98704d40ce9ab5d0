"""Who may start the next attempt: the claims that this node has granted, and for how long.

A granted claim is exclusive for a time that suffices to copy and start everything. A node that has
not started the attempt by then is passed over, so a node that only claims delays the others once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

GRANT_S = 120.0
"""Minimum time of a granted claim, in seconds; starting an attempt takes less."""
BYTES_PER_S = 20e6
"""Slowest network and disk for which a claim's time suffices, in bytes per second."""
DECIDE_S = 30.0
"""Maximum time for the node that decides to claim the next attempt, in seconds."""


@dataclass
class Grant:
    """A granted claim, and what its holder has prepared here."""

    attempt: int
    holder: str
    since_s: float
    """Start of the holder's first claim in a row, on the monotonic clock."""
    lasts_s: float
    port: int = 0
    """Port for the ranks' store that the answer named."""
    peer_port: int = 0
    intact: set[tuple[int, str]] = field(default_factory=set)
    """Step and manifest of each checkpoint here that was verified since."""
    fetched: int | None = None
    """Step of the checkpoint that the holder has chosen; None: it has not chosen one."""
    num_busy: int = 0
    """Number of its requests that are being answered."""


class Grants:
    """Claims of one attempt's nodes on the next one, as one node grants them. Thread-safe."""

    def __init__(self, nodes: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._nodes = nodes
        self._now = now
        self._grant: Grant | None = None
        self._passed_over: set[str] = set()
        self._lock = threading.RLock()

    @property
    def passed_over(self) -> frozenset[str]:
        """Nodes that had their time to start the attempt and did not."""
        with self._lock:
            grant = self._grant
            if grant is not None and self._is_over(grant):
                self.pass_over(grant.holder)
            return frozenset(self._passed_over)

    def pass_over(self, node: str) -> None:
        """Let another node start the attempt."""
        with self._lock:
            self._passed_over.add(node)
            if self._grant is not None and self._grant.holder == node:
                self._grant = None
            if self._passed_over.issuperset(self._nodes):
                self._passed_over.clear()  # each of them may try again

    def withdraw(self, node: str) -> None:
        """End a node's claim, so that others need not wait for it."""
        with self._lock:
            if self._grant is not None and self._grant.holder == node:
                self._grant = None

    def find(self, attempt: int) -> Grant | None:
        """Return the valid grant of an attempt number."""
        with self._lock:
            grant = self._grant
            return grant if grant is not None and grant.attempt == attempt else None

    @property
    def holder(self) -> str:
        """Node with a valid claim; empty: none."""
        with self._lock:
            return self._grant.holder if self._grant is not None else ""

    def refuse(self, claimer: str) -> str:
        """Return why a node's claim is refused; empty: it may be granted."""
        with self._lock:
            if claimer in self.passed_over:
                return f"{claimer} had its time to start the attempt"
            if self.holder not in ("", claimer):
                return f"{self.holder} is starting the attempt"
        return ""

    def grant(self, claimer: str, attempt: int, size_bytes: float) -> Grant:
        """Record a granted claim, which lasts as long as `size_bytes` may take to copy."""
        with self._lock:
            old = self._grant
            # Repeated claims do not prolong the time of their holder.
            is_same = old is not None and old.holder == claimer
            since_s = old.since_s if old is not None and is_same else self._now()
            lasts_s = GRANT_S + size_bytes / BYTES_PER_S
            self._grant = Grant(attempt, claimer, since_s, lasts_s)
            return self._grant

    @contextlib.contextmanager
    def using(self, grant: Grant | None) -> Iterator[None]:
        """Keep a claim valid while a request of its holder is being answered."""
        if grant is None:
            yield
            return
        with self._lock:
            grant.num_busy += 1
        try:
            yield
        finally:
            with self._lock:
                grant.num_busy -= 1

    def _is_over(self, grant: Grant) -> bool:
        return not grant.num_busy and self._now() - grant.since_s >= grant.lasts_s

"""Keeps the trained state whole for a thread that may have to save it at any time.

The state does not change between two optimizer steps, even while the training loop waits in a
collective for a lost rank. Changes happen only under this guard, so another thread can seize a
whole state, after which the loop can no longer change it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agents.trainer.rank.group import PeerLost

SEIZED = "lost its connection to another rank, and was asked to save what it holds and to end"
"""Message of a rank that was asked to end, after its name; supervisors match the first words."""


class StateGuard:
    """Excludes changes of the state forever once another thread has seized it."""

    def __init__(self, name: str = "This rank") -> None:
        self._name = name
        self._lock = threading.RLock()
        self._is_seized = False
        self._is_whole = True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the state inside the block; after an error in it the state is not whole.

        Raises:
            PeerLost: the state was seized.
        """
        with self._lock:
            if self._is_seized:
                raise PeerLost(
                    f"{self._name} {SEIZED}.", "Find the rank that ended first; its log says why"
                )
            # Stays so after an error: a half-done change cannot be saved.
            self._is_whole = False
            yield
            self._is_whole = True

    @property
    def is_usable(self) -> bool:
        """True if the state is whole and may still be changed."""
        return self._is_whole and not self._is_seized

    def seize(self, timeout_s: float) -> bool:
        """Prevent all further changes of the state; return whether it is whole.

        Args:
            timeout_s: time for a change in progress, in seconds.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._is_seized = True
        self._lock.release()
        return self._is_whole

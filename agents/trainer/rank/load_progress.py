"""Tell how far a rank is while it gets ready: reading data for twenty minutes is no standstill.

The journal shows it to people, the heartbeat names the phase should the rank be lost, and the other
ranks, which wait for this one, hear that it is alive: they give up on a rank that says nothing.
"""

from __future__ import annotations

import time

from agents.trainer.rank.group import Group
from agents.trainer.rank.journal import Heartbeat, RankJournal

_TELL_S = 2.0
"""Between two signs of life, and before the first one: small data is not worth a word."""
_JOURNAL_S = 10.0


class LoadProgress:
    """What `prepare` reports to."""

    def __init__(self, journal: RankJournal, heartbeat: Heartbeat, group: Group) -> None:
        self._journal = journal
        self._heartbeat = heartbeat
        self._group = group
        self._told_s = time.monotonic()
        self._written_s = float("-inf")
        self._phase = ""

    def tell(self, phase: str, count: int, share: float) -> None:
        """Say how far it is; quick, and may be called often.

        Args:
            phase: what is done, such as `tokenizing`.
            count: rows or pairs done.
            share: of all of them, 0 to 1.

        Raises:
            PeerLost: the connection to the other ranks is lost.
        """
        now_s = time.monotonic()
        if not self._beat(phase, now_s):
            return
        if phase != self._phase or now_s - self._written_s >= _JOURNAL_S:
            self._phase, self._written_s = phase, now_s
            self._journal.write("phase", phase=phase, count=count, share=share)

    def wait(self) -> None:
        """Say that another rank of this node does what this one waits for; it tells how far it is.

        Raises:
            PeerLost: the connection to the other ranks is lost.
        """
        self._beat("loading", time.monotonic())

    def _beat(self, phase: str, now_s: float) -> bool:
        """Give a sign of life, unless one was given just now."""
        if now_s - self._told_s < _TELL_S:
            return False
        self._told_s = now_s
        self._heartbeat.beat(0, phase)
        self._group.tell_alive()
        return True

    def end(self) -> None:
        """Say that what took so long is done, if anything was said."""
        if self._phase:
            self._phase = ""
            self._heartbeat.beat(0, "preparing")
            self._journal.write("phase", phase="preparing")

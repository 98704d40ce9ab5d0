"""Report how far a rank is while it loads: reading data for twenty minutes is no standstill.

The journal shows it to people, the heartbeat names the phase should the rank be lost, and the other
ranks, which wait for this one, get a sign of life: they give up on a rank that sends none.
"""

from __future__ import annotations

import time

from agents.trainer.rank.group import Group
from agents.trainer.rank.journal import Heartbeat, RankJournal

# Seconds between two signs of life, and before the first one: small data is not worth a report.
_PERIOD_S = 2.0
# Seconds between two records in the journal, which keeps every one of them.
_JOURNAL_PERIOD_S = 10.0


class LoadProgress:
    """Passes on the progress of loading, as often as each reader needs it."""

    def __init__(self, journal: RankJournal, heartbeat: Heartbeat, group: Group) -> None:
        self._journal = journal
        self._heartbeat = heartbeat
        self._group = group
        self._beat_s = time.monotonic()
        self._written_s = float("-inf")
        self._phase = ""

    def report(self, phase: str, count: int, share: float) -> None:
        """Report progress; returns quickly and may be called often.

        Args:
            phase: current work, such as `tokenizing`.
            count: rows or pairs done.
            share: part of all of them, 0 to 1.

        Raises:
            PeerLost: the connection to the other ranks is lost.
        """
        now_s = time.monotonic()
        if not self._beat(phase, now_s):
            return
        if phase != self._phase or now_s - self._written_s >= _JOURNAL_PERIOD_S:
            self._phase, self._written_s = phase, now_s
            self._journal.write("phase", phase=phase, count=count, share=share)

    def wait(self) -> None:
        """Report that another rank of this node does the work, and reports the progress.

        Raises:
            PeerLost: the connection to the other ranks is lost.
        """
        self._beat("loading", time.monotonic())

    def _beat(self, phase: str, now_s: float) -> bool:
        """Give a sign of life, unless the last one is recent; return whether it was given."""
        if now_s - self._beat_s < _PERIOD_S:
            return False
        self._beat_s = now_s
        self._heartbeat.beat(0, phase)
        self._group.signal_alive()
        return True

    def end(self) -> None:
        """Report the end of the work, if anything was reported of it."""
        if self._phase:
            self._phase = ""
            self._heartbeat.beat(0, "preparing")
            self._journal.write("phase", phase="preparing")

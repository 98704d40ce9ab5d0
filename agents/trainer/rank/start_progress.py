"""Report the progress of a rank before its first step, so that a slow start is no hang.

The journal shows it to users, the heartbeat names the phase in case the rank is lost, and the other
ranks get a sign of life: they give up on a rank that sends none.
"""

from __future__ import annotations

import threading
import time

from agents.trainer.rank.group import Group
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.start_times import StartTimes

# Time between two signs of life, and before the first one: short work needs no report; in seconds.
_PERIOD_S = 2.0
# Time between two records of a phase of unknown length, which all stay in the journal, in seconds.
_JOURNAL_PERIOD_S = 10.0
# Time after which the speed of a phase is known, in seconds.
_MEASURED_S = 1.0


class StartProgress:
    """Forwards the progress of a start to each reader, at the rate that it needs."""

    def __init__(
        self, journal: RankJournal, heartbeat: Heartbeat, group: Group, times: StartTimes
    ) -> None:
        self._journal = journal
        self._heartbeat = heartbeat
        self._group = group
        self.times = times
        """Times of earlier starts on this node."""
        self._lock = threading.Lock()
        self._beat_s = time.monotonic()
        self._written_s = float("-inf")
        self._phase = ""
        # Time at which the phase started, the amount done by then, and the amount done now.
        self._began_s = self._began = self._done = 0.0

    def report(
        self, phase: str, done: float, total: float, expected_s: float | None = None
    ) -> None:
        """Report the progress of a phase with a known end.

        Returns quickly, may be called often and in any thread.

        Args:
            phase: current work, such as `weights` or `tuning`.
            done: amount done, such as bytes read or settings tried.
            total: amount at the end of the phase.
            expected_s: time until then, in seconds; None estimates it from the speed so far, or at
                first from the speed of earlier starts.

        Raises:
            PeerLost: the connection to the other ranks is lost.
        """
        now_s = time.monotonic()
        with self._lock:
            begins = phase != self._phase
            if begins:
                self._phase, self._began_s, self._began = phase, now_s, done
            self._done = done
            if not begins and now_s - self._written_s < _PERIOD_S:
                return
            if expected_s is None:
                expected_s = self._estimate(phase, total, now_s)
            self._written_s = now_s
        self._beat(phase, now_s)
        if begins and expected_s is not None and expected_s < _PERIOD_S:
            return  # over before a user has read it
        self._journal.write("phase", phase=phase, done=done, total=total, expected_s=expected_s)

    def _estimate(self, phase: str, total: float, now_s: float) -> float | None:
        elapsed_s, done = now_s - self._began_s, self._done - self._began
        if elapsed_s >= _MEASURED_S and done > 0:
            return (total - self._done) * elapsed_s / done
        per_s = self.times.recall(_name_speed(phase))
        return (total - self._done) / per_s if per_s else None

    def report_share(self, phase: str, count: int, share: float) -> None:
        """Report the progress of a phase whose speed varies; returns quickly, may be called often.

        Args:
            phase: current work, such as `tokenizing`.
            count: number of rows or pairs done.
            share: fraction done, 0 to 1.

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
        """Report that another rank of this node does the work and reports its progress.

        Raises:
            PeerLost: the connection to the other ranks is lost.
        """
        self._beat("loading", time.monotonic())

    def _beat(self, phase: str, now_s: float) -> bool:
        """Give a sign of life unless the last one is recent; return whether it was given."""
        if now_s - self._beat_s < _PERIOD_S:
            return False
        self._beat_s = now_s
        # Step 0: no step of this attempt is done before its start ends.
        self._heartbeat.beat(0, phase)
        self._group.signal_alive()
        return True

    def end(self) -> None:
        """Report the end of the work if any was reported, and store its speed."""
        with self._lock:
            phase, self._phase = self._phase, ""
            elapsed_s, done = time.monotonic() - self._began_s, self._done - self._began
            self._done = self._began = 0.0
        if not phase:
            return
        if elapsed_s >= _MEASURED_S and done > 0:
            self.times.remember(done / elapsed_s, _name_speed(phase))
        self._heartbeat.beat(0, "preparing")
        self._journal.write("phase", phase="preparing")


def _name_speed(phase: str) -> str:
    return f"{phase} per second"

"""Tell a network that is away for a while from ranks that hang.

While ranks stand still, the other nodes of the attempt are asked whether they answer. As long as
one does not, the ranks wait for it, up to the time that a person has chosen. Once all answer again,
they get as long again as the outage took: the kernel doubles its pauses between tries to send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from agents.contract.run import AttemptIntent
from agents.supervisor.peers import find_unreachable

ASKED_AFTER_S = (1.0, 5.0)
"""Shortest and longest silence of a rank after which the other nodes are asked, in seconds; in
between it is half of the time that a person has chosen."""
PAUSE_S = 2.0
"""Time between two questions, in seconds."""
GOING_ON_S = 10.0
"""Least time for ranks to go on after an outage, in seconds."""


class OutageWatch:
    """Follows which other nodes can be reached, on a thread of its own while somebody waits."""

    def __init__(
        self,
        intent: AttemptIntent,
        ask: Callable[[AttemptIntent], tuple[str, ...]] = find_unreachable,
    ) -> None:
        self._intent = intent
        self._ask = ask
        self._asked_after_s = sorted((*ASKED_AFTER_S, intent.outage_s / 2))[1]
        self._thread: threading.Thread | None = None
        self._answer: tuple[str, ...] | None = None
        self._due_s = 0.0
        self.silent: tuple[str, ...] = ()
        """Nodes that did not answer the last question."""
        self._healed_s: float | None = None
        self._outage_s = 0.0

    def look(self, waits_s: float, now_s: float) -> None:
        """Take the last answer, and ask again while ranks wait.

        Args:
            waits_s: time for which a rank has waited for other nodes, in seconds; 0: none does.
            now_s: time on the monotonic clock, in seconds.
        """
        if waits_s < self._asked_after_s or not self._intent.addresses:
            self.silent, self._healed_s, self._answer = (), None, None
            return
        if self._thread is not None and self._thread.is_alive():
            return
        answer, self._answer = self._answer, None
        if answer:
            self.silent, self._healed_s = answer, None
        elif answer is not None and self.silent:
            # The wait began with the outage, or soon after.
            self.silent, self._healed_s, self._outage_s = (), now_s, waits_s
        if now_s >= self._due_s:
            self._due_s = now_s + PAUSE_S
            self._thread = threading.Thread(target=self._find, name="outages", daemon=True)
            self._thread.start()

    def excuses(self, waits_s: float, now_s: float) -> bool:
        """Return whether a rank that has waited for `waits_s` may wait on."""
        if self.silent:
            return waits_s < self._intent.outage_s
        if self._healed_s is None:
            return False
        return now_s - self._healed_s < max(GOING_ON_S, min(self._outage_s, self._intent.outage_s))

    def _find(self) -> None:
        self._answer = self._ask(self._intent)

"""Watch a program of a request from outside: one that hangs is named in seconds, and then ended.

A program that is stopped, frozen, or stuck in a driver cannot say so, and its request would wait
forever. Slow work is no hang; see `agents.supervisor.process_signs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from agents.errors import ExpectedError
from agents.supervisor.process_signs import (
    HALTED,
    Usage,
    describe_state,
    read_process_state,
    read_usage,
    shows_work,
)

NAMED_AFTER_S = 10.0
"""Time without a sign of work after which a program is reported, in seconds."""
ENDED_AFTER_S = 60.0
"""Time without a sign of work after which a program is ended, in seconds."""
_PAUSE_S = 2.0


class ProgramWatch:
    """Signs of work of one program; `look` is called about twice a second."""

    def __init__(
        self, what: str, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start to watch.

        Args:
            what: name of the work, at the beginning of a sentence.
            report: receives a sentence when the program stands still, and when it continues.
            clock: returns the time in seconds.
        """
        self._what = what
        self._report = report
        self._clock = clock
        self._sign_s = self._due_s = clock()
        self._before: tuple[float, Usage] | None = None
        self._is_named = False

    def note_line(self) -> None:
        """Record that the program has printed a line."""
        self._sign_s = self._clock()

    def look(self, pid: int) -> None:
        """Check the program.

        Raises:
            ExpectedError: it has shown no sign of work for too long, and has to be ended.
        """
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _PAUSE_S
        state, usage, before = read_process_state(pid), read_usage(pid), self._before
        self._before = (now_s, usage)
        if before and state not in HALTED and shows_work(before[1], usage, now_s - before[0]):
            self._sign_s = now_s
        quiet_s = now_s - self._sign_s
        if quiet_s > ENDED_AFTER_S:
            raise ExpectedError(
                f"{self._what} was ended, since it stood still for {quiet_s:.0f} s."
                f"{describe_state(state, usage)}",
                "Try again; if it happens again, restart that PC",
            )
        if (quiet_s > NAMED_AFTER_S) == self._is_named:
            return
        self._is_named = not self._is_named
        if self._is_named:
            cause = describe_state(state, usage)
            self._report(f"{self._what} has stood still for {quiet_s:.0f} s.{cause}")
        else:
            self._report(f"{self._what} continues.")

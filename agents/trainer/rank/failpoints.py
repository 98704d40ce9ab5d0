"""Points at which a test can kill this process, one between every two durable operations.

`RACKLESS_FAILPOINT=name` ends the process with SIGKILL, like a power cut, when `reach(name)` is
called; `name:3` at the third call. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "RACKLESS_FAILPOINT"


class Failpoints:
    """Counts reached points, and kills the process at the one in the setting."""

    def __init__(self, setting: str = "") -> None:
        name, _, count = setting.partition(":")
        self._name = name
        self._count = int(count or 1)
        self._reached: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Die if this is the named point, reached the given number of times."""
        if name != self._name:
            return
        self._reached[name] += 1
        if self._reached[name] == self._count:
            # Not an exception: handlers must not clean up, as they cannot in a power cut.
            os.kill(os.getpid(), signal.SIGKILL)


def failpoints_from_environment() -> Failpoints:
    """Return the failpoints of the environment; normally none are set."""
    return Failpoints(os.environ.get(VARIABLE, ""))

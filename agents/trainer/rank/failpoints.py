"""Points at which a test can kill this process, one between every two durable operations.

`RACKLESS_FAILPOINT=name` ends the process with SIGKILL, as a power cut would, when `reach(name)` is
called; `name:3` at the third call. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "RACKLESS_FAILPOINT"


class Failpoints:
    """Counts the points that are reached, and dies at the one that the setting names."""

    def __init__(self, setting: str = "") -> None:
        name, _, count = setting.partition(":")
        self._name = name
        self._count = int(count or 1)
        self._reached: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Die here if this is the named point, reached the given number of times."""
        if name != self._name:
            return
        self._reached[name] += 1
        if self._reached[name] == self._count:
            # Not an exception: no handler may tidy up, as none does in a power cut.
            os.kill(os.getpid(), signal.SIGKILL)


def failpoints_from_environment() -> Failpoints:
    """Return the failpoints that the environment sets; normally none."""
    return Failpoints(os.environ.get(VARIABLE, ""))

"""Points at which a test may kill this process, one between every two durable operations.

`RACKLESS_FAILPOINT=name` ends the process with SIGKILL, as a power cut would, when `reach(name)` is
called; `name:3` at the third call. Without the variable a point costs one look-up.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "RACKLESS_FAILPOINT"


class Failpoints:
    """Counts the points that were reached and dies at the one that was named."""

    def __init__(self, setting: str = "") -> None:
        name, _, count = setting.partition(":")
        self._name = name
        self._count = int(count or 1)
        self._reached: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Die here when this is the named point and the named time."""
        if name != self._name:
            return
        self._reached[name] += 1
        if self._reached[name] == self._count:
            os.kill(os.getpid(), signal.SIGKILL)


def failpoints_from_environment() -> Failpoints:
    """Return the points as the environment sets them; normally none."""
    return Failpoints(os.environ.get(VARIABLE, ""))

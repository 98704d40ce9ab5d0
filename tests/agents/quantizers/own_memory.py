"""Peak of the memory that a block of a test takes for itself, mapped files left out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

_EVERY_S = 0.005


class OwnMemory:
    """Watches this process inside a `with` block."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Largest memory beyond that at the start, in bytes."""
        self._started = read_own_bytes()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, read_own_bytes() - self._started)


def read_own_bytes() -> int:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

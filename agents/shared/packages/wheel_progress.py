"""Report the progress of a transfer of packages, about once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SAY_EVERY_S = 1.0
"""Minimum time between two sentences, in seconds."""


class WheelProgress:
    """Counts files and bytes; safe for several threads."""

    def __init__(
        self,
        say: Callable[[str], None],
        doing: str,
        *,
        num_total: int | None = None,
        num_done: int = 0,
        total_bytes: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a count.

        Args:
            say: function that receives the sentences.
            doing: `fetching` or `copying`.
            num_total: number of files of the whole set; None: only bytes are counted.
            num_done: number of files that were present before.
            total_bytes: size of the files to transfer; None: not known.
            now: clock, in seconds.
        """
        self._say = say
        self._doing = doing
        self._num_total = num_total
        self._num_done = num_done
        self._total_bytes = total_bytes
        self._now = now
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._old_bytes: dict[str, int] = {}
        self._began_s = now()
        self._said_s = float("-inf")

    def begin_file(self, name: str, old_bytes: int) -> None:
        """Begin a file, of which an earlier try has left `old_bytes`."""
        with self._lock:
            self._bytes[name] = self._old_bytes[name] = old_bytes

    def reach(self, name: str, num_bytes: int) -> None:
        """Update the number of present bytes of a file."""
        with self._lock:
            self._bytes[name] = num_bytes
        self._report()

    def end_file(self) -> None:
        """Count a complete file."""
        with self._lock:
            self._num_done += 1
        self._report(always=self._num_done == self._num_total)

    def _report(self, *, always: bool = False) -> None:
        with self._lock:
            now_s = self._now()
            if now_s - self._said_s < SAY_EVERY_S and not always:
                return
            self._said_s = now_s
            done = sum(self._bytes.values())
            # Bytes of an earlier try are done, but say nothing about the speed.
            new = done - sum(self._old_bytes.values())
            took_s = max(now_s - self._began_s, 1e-3)
        count = f"{self._num_done} of {self._num_total}, " if self._num_total is not None else ""
        of = f" of {show_size(self._total_bytes)}" if self._total_bytes is not None else ""
        self._say(
            f"{self._doing} packages: {count}{show_size(done)}{of}, {show_size(new / took_s)}/s"
        )


def show_size(size: float) -> str:
    """Return a number of bytes in readable form.

    >>> [show_size(size) for size in (900, 45_300_000, 2_900_000_000)]
    ['0.0 MB', '45.3 MB', '2.90 GB']
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

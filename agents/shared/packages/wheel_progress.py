"""How far a transfer of packages is, in a sentence about once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SAY_EVERY_S = 1.0
"""Least time between two sentences, in seconds."""


class WheelProgress:
    """Counts files and bytes; may be told by several threads."""

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
            say: gets the sentences.
            doing: `fetching` or `copying`.
            num_total: files of the whole set; None: only bytes are counted.
            num_done: files of it that were there before.
            total_bytes: size of the files that come; None: not known.
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
        """Tell that a file comes, of which an earlier try has left `old_bytes`."""
        with self._lock:
            self._bytes[name] = self._old_bytes[name] = old_bytes

    def reach(self, name: str, num_bytes: int) -> None:
        """Tell how many bytes of a file are there."""
        with self._lock:
            self._bytes[name] = num_bytes
        self._tell()

    def end_file(self) -> None:
        """Tell that a file is whole."""
        with self._lock:
            self._num_done += 1
        self._tell(always=self._num_done == self._num_total)

    def _tell(self, *, always: bool = False) -> None:
        with self._lock:
            now_s = self._now()
            if now_s - self._said_s < SAY_EVERY_S and not always:
                return
            self._said_s = now_s
            done = sum(self._bytes.values())
            new = done - sum(self._old_bytes.values())
            took_s = max(now_s - self._began_s, 1e-3)
        count = f"{self._num_done} of {self._num_total}, " if self._num_total is not None else ""
        of = f" of {show_size(self._total_bytes)}" if self._total_bytes is not None else ""
        self._say(
            f"{self._doing} packages: {count}{show_size(done)}{of}, {show_size(new / took_s)}/s"
        )


def show_size(size: float) -> str:
    """Return a number of bytes for people.

    >>> [show_size(size) for size in (900, 45_300_000, 2_900_000_000)]
    ['0.0 MB', '45.3 MB', '2.90 GB']
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

"""Notice that the disk of a run's files is full, also on a node that saves no checkpoint.

A rank that cannot save says so by itself. One that only computes would go on in silence, and its
log would end without a reason.
"""

from __future__ import annotations

from pathlib import Path

from agents.disk_space import free_bytes, free_files

FULL_BYTES = 4 << 20
"""Free space below which a disk counts as full, in bytes."""
FULL_FILES = 16
"""Files that a disk can still take, below which it counts as full."""
INTERVAL_S = 2.0
"""Time between two looks, in seconds."""


class FullDiskWatch:
    """Follows the free space of one folder's disk.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_s = 0.0
        self._lacks = ""

    def look(self, now_s: float) -> str | None:
        """Return what the disk lacks since this look: `bytes` or `files`; "" if it has room again.

        Args:
            now_s: time on the monotonic clock, in seconds.

        Returns:
            None: nothing has changed, or it was not looked.
        """
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        try:
            num_bytes, num_files = free_bytes(self._folder), free_files(self._folder)
        except OSError:  # its disk is gone; ranks will say so
            return None
        factor = 2 if self._lacks else 1  # twice as much again, or it would flap
        lacks = ""
        if num_bytes < factor * FULL_BYTES:
            lacks = "bytes"
        elif num_files is not None and num_files < factor * FULL_FILES:
            lacks = "files"
        if lacks == self._lacks:
            return None
        self._lacks = lacks
        return lacks

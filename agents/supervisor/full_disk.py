"""Detect a full disk on every node of a run, including nodes that save no checkpoints.

A rank that cannot save reports it itself. A rank that only computes would continue silently, and
its log would end without a reason.
"""

from __future__ import annotations

from pathlib import Path

from agents.disk_space import free_bytes, free_files

FULL_BYTES = 4 << 20
"""Free space below which a disk counts as full, in bytes."""
FULL_FILES = 16
"""Number of free inodes below which a disk counts as full."""
INTERVAL_S = 2.0
"""Time between two checks, in seconds."""


class FullDiskWatch:
    """Watch over the free space on the disk of an existing folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_s = 0.0
        self._lacks = ""

    def look(self, now_s: float) -> str | None:
        """Check the disk if a check is due, and report a change.

        Args:
            now_s: time on the monotonic clock, in seconds.

        Returns:
            `bytes` or `files` if the disk now lacks them, "" if it has room again, None without a
            change or without a check.
        """
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        try:
            num_bytes, num_files = free_bytes(self._folder), free_files(self._folder)
        except OSError:  # the disk is gone, which the ranks report
            return None
        factor = 2 if self._lacks else 1  # hysteresis, so that the state does not flap
        lacks = ""
        if num_bytes < factor * FULL_BYTES:
            lacks = "bytes"
        elif num_files is not None and num_files < factor * FULL_FILES:
            lacks = "files"
        if lacks == self._lacks:
            return None
        self._lacks = lacks
        return lacks

"""Watches the free space for checkpoints on this rank's disk, and reports changes once each.

A failed save comes minutes after the disk filled up, and would be reported at every checkpoint. So
free space is continuously compared with the size of a checkpoint, and the report names how much to
free. A read-only disk, as the kernel leaves one that has failed, is reported as early. When there
is space again after a failed save, the next step saves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents.disk_space import free_bytes, free_files
from agents.trainer.checkpoint.folder import CannotWrite, NoRoom
from agents.trainer.rank.journal import RankJournal

LOOK_S = 2.0
"""Minimum time between two checks of the disk, in seconds."""
MOST_RETRY_S = 600.0
"""Maximum time between two retries of a save that seems to fit, in seconds."""
_SLACK_BYTES = 64 << 10
"""Size of a checkpoint without its tensors (headers, configs, manifest), in bytes."""


_NUM_FILES = 16
"""Bound on the number of files and folders of one rank's checkpoint. A file system may also limit
files (inodes), which its free bytes do not show.
"""


class DiskWatch:
    """The disk of one rank that writes checkpoints. Every method is safe in any thread.

    Args:
        folder: folder of the run's checkpoints, created with the first one.
        otherwise: existing folder on the same disk, used until then.
        node: name of this node, for messages.
        journal: journal of this rank.
        tensor_bytes: returns the bytes of a checkpoint's tensors; 0 if not known yet.
    """

    def __init__(
        self,
        folder: Path,
        otherwise: Path,
        node: str,
        journal: RankJournal,
        tensor_bytes: Callable[[], int],
    ) -> None:
        self._folder = folder
        self._otherwise = otherwise
        self._node = node
        self._journal = journal
        self._tensor_bytes = tensor_bytes
        self._looked_s = float("-inf")
        self._failed_s: float | None = None
        self._retry_s = LOOK_S
        self._is_reported = False
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Poll free space and report changes; return whether a failed save can be retried."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        has_room = self.has_room()
        with self._lock:
            if not has_room:
                self._report(*self._describe())
                return False
            if self._is_reported and self._failed_s is None:
                self._report_room()
            return self._failed_s is not None and now_s - self._failed_s >= self._retry_s

    def has_room(self) -> bool:
        """Return whether a checkpoint can be written: it fits, or its size is not known yet."""
        return self._is_writable() and self._missing_bytes() <= 0 and self._missing_files() <= 0

    def note_failed(self, error: CannotWrite, step: int) -> CannotWrite:
        """Record that no checkpoint could be written; return the error with the space to free."""
        has_room = self.has_room()
        # The error of the system does not say how much to free.
        if isinstance(error, NoRoom) and not has_room:
            error = NoRoom(*self._describe())
        elif not self._is_writable():
            error = CannotWrite(*self._describe())
        with self._lock:
            # A quota, or a disk that refuses writes: a retry at each check would only delay
            # training.
            self._retry_s = min(2 * self._retry_s, MOST_RETRY_S) if has_room else LOOK_S
            self._journal.write(
                "checkpoint_failed",
                step=step,
                message=error.message,
                hint=error.hint,
                repeated=self._is_reported,
            )
            self._is_reported = True
            self._failed_s = time.monotonic()
        return error

    def note_saved(self) -> None:
        """Record that a checkpoint was written."""
        with self._lock:
            self._failed_s, self._retry_s = None, LOOK_S
            if self._is_reported:
                self._report_room()

    def _report(self, message: str, hint: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._journal.write("warning", message=message, hint=hint)

    def _report_room(self) -> None:
        self._is_reported = False
        self._journal.write("disk_room", free_bytes=self._free_bytes())

    def _is_writable(self) -> bool:
        folder = self._folder if self._folder.is_dir() else self._otherwise
        # The kernel remounts a failing disk read-only, which access() reports as well.
        return os.access(folder, os.W_OK)

    def _missing_bytes(self) -> int:
        free, tensors = self._free_bytes(), self._tensor_bytes()
        if free is None or not tensors:
            return 0
        # One percent for alignment in the files and for metadata of the file system.
        return tensors + tensors // 100 + _SLACK_BYTES - free

    def _missing_files(self) -> int:
        free = self._ask(free_files)
        return _NUM_FILES - free if free is not None else 0

    def _free_bytes(self) -> int | None:
        return self._ask(free_bytes)

    def _ask(self, question: Callable[[Path], int | None]) -> int | None:
        # The run's folder is created by the first save.
        for folder in (self._folder, self._otherwise):
            with contextlib.suppress(OSError):
                return question(folder)
        return None

    def _describe(self) -> tuple[str, str]:
        if not self._is_writable():
            return (
                f"The disk of node {self._node} is read-only, or the rights of {self._folder} have "
                "changed: no checkpoint can be written.",
                "See there whether the disk has failed: sudo dmesg. Once the folder can be written "
                "again, the next step is saved. Training continues and waits at its end",
            )
        if self._missing_bytes() <= 0 < (files := self._missing_files()):
            return (
                f"The disk of node {self._node} is full: it has room, but takes no more files (its "
                "inodes are used up).",
                f"Delete at least {files} files on the disk of {self._folder}; then the next step "
                "is saved. Training continues and waits at its end",
            )
        free, missing = self._free_bytes() or 0, max(self._missing_bytes(), 1)
        return (
            f"The disk of node {self._node} is full: a checkpoint needs {_show(free + missing)}, "
            f"and {_show(free)} are free.",
            f"Free at least {_show(missing)} for {self._folder}; then the next step is saved. "
            "Training continues and waits at its end",
        )


def _show(size_bytes: int) -> str:
    """Return a size for display.

    >>> _show(165_100), _show(1_234_567), _show(9_876_543_210)
    ('165 kB', '1.2 MB', '9.88 GB')
    """
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.2f} GB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"

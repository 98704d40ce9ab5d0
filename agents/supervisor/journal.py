"""Append JSON lines to a journal; on a full disk lines may be lost, but the run continues.

Space for the next lines is reserved in advance, so lines are lost only after a long time on a full
disk. A crash may cut the end of a journal that masters have read already. The next line then begins
after a gap, so that it neither continues the cut line nor lies at an offset that was read before.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from agents.disk_space import give_back, hold_ahead

_HELD_BYTES = 16 << 10
"""Space reserved for the next lines, in bytes; enough for about a hundred."""
GAP_BYTES = 4 << 10
"""Newlines written after a line that was cut, in bytes; more than a crash usually cuts."""


class AttemptJournal:
    """An append-only file in which each line is one write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dropped = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line with its kind and the wall-clock time, or count it as dropped."""
        line = {"kind": kind, "time_s": time.time(), **fields}
        if self._dropped:
            line["dropped_before"] = self._dropped
        data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            self._append(data)
        except OSError:
            self._dropped += 1  # the next line reports the gap
        else:
            self._dropped = 0

    def _append(self, data: bytes) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" * GAP_BYTES + data
            # A nearly full disk may take half a line, which would corrupt the next one.
            if os.write(file, data) != len(data):
                os.ftruncate(file, size)
                raise OSError("short write")
            hold_ahead(file, _HELD_BYTES)
        finally:
            os.close(file)


def give_back_all(folder: Path) -> None:
    """Release the reserved space of all journals in a folder, once their writers have ended.

    A rank that was killed cannot release its own.
    """
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                give_back(file)
            finally:
                os.close(file)

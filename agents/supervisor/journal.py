"""Append JSON lines to a journal; a full disk loses lines, never the run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class AttemptJournal:
    """One append-only file; each line is one write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dropped = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line with its kind and the wall clock; count it when it cannot be written."""
        line = {"kind": kind, "time_s": time.time(), **fields}
        if self._dropped:
            line["dropped_before"] = self._dropped
        data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            self._append(data)
        except OSError:
            self._dropped += 1
        else:
            self._dropped = 0

    def _append(self, data: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            # On a nearly full disk; half a line would spoil the next one.
            if os.write(file, data) != len(data):
                os.ftruncate(file, size)
                raise OSError("short write")
        finally:
            os.close(file)

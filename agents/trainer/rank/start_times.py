"""Durations of earlier starts on this node, which predict the next one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agents.errors import ExpectedError
from agents.state import read_json, write_json

_FILE = "start_times.json"
# Maximum number of entries: compiling has one per shape.
_CAPACITY = 200


class StartTimes:
    """Seconds, or amounts per second, by name, in a file of a folder that stays on the node.

    They affect only the display, so a lost or damaged file is no error, and ranks that write at the
    same time may replace each other's entries.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def recall(self, *names: str) -> float | None:
        """Return the first entry found under these names, or None."""
        known = self._read()
        return next((known[name] for name in names if name in known), None)

    def remember(self, value: float, *names: str) -> None:
        """Store a value under each of the names."""
        known = self._read()
        for name in names:
            known.pop(name, None)  # the newest entries come last
            known[name] = round(value, 3)
        kept = dict([*known.items()][-_CAPACITY:])
        with contextlib.suppress(OSError, ExpectedError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._path, kept)

    def _read(self) -> dict[str, float]:
        found = read_json(self._path) or {}
        return {
            name: float(v) for name, v in found.items() if isinstance(v, (int, float)) and v > 0
        }

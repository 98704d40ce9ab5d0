"""The log of changes that repairs made to this node, with one file per change.

A record is written before and after each step, so that an interrupted step can be undone, too. It
contains the texts of edited files and is private to the agent's user.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from agents.contract.messages import MAX_LINE_BYTES
from agents.contract.names import whole_number
from agents.contract.repair import Change
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.state import Home, locked, read_json, write_json

# Maximum wait for another repair of this node to end, in seconds.
_LOCK_S = 5.0
_MAX_LIST_BYTES = MAX_LINE_BYTES // 2  # half of a message, for the rest of the answer


class ChangeLog:
    """The change records of one node."""

    def __init__(self, home: Home) -> None:
        self._folder = home.path / "changes"

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Exclude other repairs of this node within the block.

        Raises:
            ExpectedError: another repair is being applied or undone, or the disk refuses.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise explain_os_error(error, f"preparing {self._folder}") from error
        busy = "Another repair is being applied to this node."
        # The kernel frees the lock after a kill, so an interrupted repair blocks no other.
        with locked(self._folder / ".lock", _LOCK_S, busy):
            yield

    def next_number(self) -> int:
        return max(self._numbers(), default=0) + 1

    def save(self, change: Change) -> None:
        """Store a record durably.

        Raises:
            ExpectedError: the disk is full or cannot be written.
        """
        write_json(self._file(change.number), to_wire(change))

    def all(self) -> list[Change]:
        """Return the readable records, oldest first."""
        return [found for number in self._numbers() if (found := self._read(number)) is not None]

    def require(self, number: int) -> Change:
        """Return one record.

        Raises:
            ExpectedError: no record has this number.
        """
        found = self._read(number)
        if found is None:
            raise ExpectedError(f"There is no change {number} in this node's log.")
        return found

    def newest(self) -> list[Change]:
        """Return the newest records that fit into an answer, oldest first."""
        left_bytes = _MAX_LIST_BYTES
        kept: list[Change] = []
        for change in reversed(self.all()):
            # Records contain the texts of edited files, so a few may fill a message.
            left_bytes -= len(json.dumps(to_wire(change)))
            if left_bytes < 0 and kept:
                break
            kept.append(change)
        return kept[::-1]

    def _read(self, number: int) -> Change | None:
        try:
            return from_wire(Change, read_json(self._file(number)))
        except WireError:
            return None

    def _numbers(self) -> list[int]:
        names = (file.stem for file in self._folder.glob("*.json"))
        return sorted(number for name in names if (number := whole_number(name)) is not None)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.json"

"""Filter the lines of a log by level: all, warnings and errors, or errors; without Qt.

The programs of a run log in no common format, so words decide; a traceback's indented lines belong
to it. Each block is scanned once, however often lines are appended after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from app.gui.logs.log_document import Block, LogDocument

Level = Literal["all", "warnings", "errors"]
Numbers = NDArray[np.int64]
# Lower case, as `find_lines` lowers the block; bytes, so that no line has to be decoded.
_ERRORS = (b"error", b"exception", b"critical", b"fatal", b"out of memory", b"killed")
_WORDS: dict[Level, tuple[bytes, ...]] = {
    "warnings": (b"warn", *_ERRORS),
    "errors": _ERRORS,
}
# The last line names the exception and matches by its words; header and frames do not.
_TRACEBACK = re.compile(rb"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*", re.MULTILINE)


class ShownLines:
    """Maps the rows of a view to line numbers of the document."""

    def __init__(self, document: LogDocument) -> None:
        self._document = document
        self._level: Level = "all"
        self._numbers: Numbers = np.empty(0, np.int64)
        self._found: dict[int, tuple[Block, Numbers]] = {}
        """Matching lines of each block, counted from its first, by `id` of the block.

        The block itself is kept with them, so that its id is not reused for another.
        """

    @property
    def level(self) -> Level:
        """The level that is shown."""
        return self._level

    def __len__(self) -> int:
        return self._document.num_lines if self._level == "all" else len(self._numbers)

    def choose(self, level: Level) -> None:
        """Show the lines of another level."""
        # The lines found so far are those of the old level.
        self._level, self._found = level, {}
        self.refresh()

    def refresh(self) -> None:
        """Update after lines were appended or dropped."""
        if self._level == "all":
            return
        found, parts = {}, []
        for first, block in self._document.blocks():
            # Only the last block is ever new: appending replaces it by a longer one.
            known = self._found.get(id(block))
            lines = known[1] if known and known[0] is block else find_lines(block, self._level)
            found[id(block)] = (block, lines)
            parts.append(lines + first)
        self._found = found
        self._numbers = np.concatenate(parts) if parts else np.empty(0, np.int64)

    def number(self, row: int) -> int:
        """Return the line number of a row, clamped to the rows there are."""
        row = min(max(row, 0), max(len(self) - 1, 0))
        if self._level == "all" or not len(self._numbers):
            return self._document.first_line + row
        return int(self._numbers[row])

    def row_of(self, number: int) -> int | None:
        """Return the row of a line number; None if the level hides it."""
        if self._level == "all":
            return number - self._document.first_line
        row = int(np.searchsorted(self._numbers, number))
        return row if row < len(self._numbers) and self._numbers[row] == number else None


def find_lines(block: Block, level: Level) -> Numbers:
    """Return the lines of a block, counted from 0, that `level` shows, in order."""
    places = np.fromiter(_find_words(block.data.lower(), _WORDS[level]), np.int64)
    lines = [np.searchsorted(block.starts, places, side="right") - 1]
    for match in _TRACEBACK.finditer(block.data):
        first, last = (
            int(np.searchsorted(block.starts, place, side="right")) - 1
            for place in (match.start(), match.end() - 1)
        )
        lines.append(np.arange(first, last + 1))
    # A line may match several words and be part of a traceback, too.
    return np.unique(np.concatenate(lines))


def _find_words(data: bytes, words: tuple[bytes, ...]) -> Iterator[int]:
    """Yield the offset of the first match of each word in each line."""
    for word in words:
        place = data.find(word)
        while place >= 0:
            yield place
            # Skip to the next line: one match per line is enough.
            end = data.find(b"\n", place)
            place = data.find(word, end) if end >= 0 else -1

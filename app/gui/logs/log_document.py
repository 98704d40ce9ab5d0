"""The lines of a log, indexed for immediate access to any of a million lines; without Qt.

Bytes arrive in order, in chunks of any size, and are kept in blocks of whole lines with the offsets
of their lines. `split_blocks` does the indexing of a file, off the Qt thread. Beyond `max_bytes`
the oldest blocks are dropped; line numbers still count from the start of the file.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
"""Target size of a block, in bytes."""
MAX_BYTES = 256 << 20
"""Maximum size of the lines kept in memory, in bytes."""
MAX_LINE_CHARS = 2000
"""Maximum number of characters shown of a line; copying takes all of it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive lines; all but perhaps the last end in a newline."""

    data: bytes
    starts: NDArray[np.int64]
    """Offset of the first byte of each line in `data`."""

    @property
    def num_lines(self) -> int:
        return len(self.starts)

    @property
    def is_open(self) -> bool:
        """True if the last line has no newline yet, and may grow."""
        return not self.data.endswith(b"\n")

    def line(self, index: int) -> bytes:
        start = int(self.starts[index])
        end = int(self.starts[index + 1]) if index + 1 < len(self.starts) else len(self.data)
        return self.data[start:end].rstrip(b"\r\n")


def make_block(data: bytes) -> Block:
    """Index the lines of `data`."""
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    starts = np.concatenate((np.zeros(1, np.int64), newlines))
    # The last newline ends a line and starts none.
    if len(starts) > 1 and starts[-1] == len(data):
        starts = starts[:-1]
    return Block(data, starts)


class LogDocument:
    """An append-only log; not thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._blocks: list[Block] = []
        # Line number of the first line of each block.
        self._firsts: list[int] = []
        self.first_line = 0
        """Line number of the oldest line that is kept."""
        self.size_bytes = 0

    @property
    def end_line(self) -> int:
        """The line number after the last line."""
        return self._firsts[-1] + self._blocks[-1].num_lines if self._blocks else self.first_line

    @property
    def num_lines(self) -> int:
        return self.end_line - self.first_line

    def append(self, data: bytes) -> None:
        """Append bytes; small chunks are merged into the last block."""
        if not data:
            return
        self.size_bytes += len(data)
        last = self._blocks[-1] if self._blocks else None
        if last is not None and _should_join(last, len(data)):
            self._blocks[-1] = make_block(last.data + data)
        else:
            self.append_block(make_block(data), counted=True)
        self._trim()

    def append_block(self, block: Block, *, counted: bool = False) -> None:
        """Append an indexed block; the last block must not be open."""
        self._firsts.append(self.end_line)
        self._blocks.append(block)
        if not counted:
            self.size_bytes += len(block.data)
            self._trim()

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield the line number of each block's first line, and the block."""
        yield from zip(self._firsts, self._blocks, strict=True)

    def line(self, number: int) -> str:
        """Return the text of a line; bytes that are not UTF-8 become replacement characters."""
        place = bisect.bisect_right(self._firsts, number) - 1
        return self._blocks[place].line(number - self._firsts[place]).decode("utf-8", "replace")

    def search(self, words: str, start: int, *, backward: bool = False) -> Iterator[int | None]:
        """Search for `words`, ignoring case, from line `start` on and around the end.

        Yields None after each block without a match, where the caller may pause, and then the
        line number of the match; ends without a number if nothing matches.
        """
        needle = words.casefold().encode("utf-8").lower()
        if not needle or not self._blocks:
            return
        place = max(bisect.bisect_right(self._firsts, start) - 1, 0)
        count = len(self._blocks)
        for turn in range(count + 1):  # the first block twice: after `start`, then before it
            number = (place - turn if backward else place + turn) % count
            found = _find_in(
                self._blocks[number],
                needle,
                start - self._firsts[number] if turn == 0 else None,
                backward,
            )
            if found is not None:
                yield self._firsts[number] + found
                return
            yield None

    def _trim(self) -> None:
        # The last block always stays, at any size: the user may be reading it.
        while self.size_bytes > self._max_bytes and len(self._blocks) > 1:
            gone = self._blocks.pop(0)
            self._firsts.pop(0)
            self.size_bytes -= len(gone.data)
            self.first_line = self._firsts[0]


def _should_join(last: Block, num_bytes: int) -> bool:
    """Return whether bytes belong in the last block.

    Small chunks do, and so does the rest of an open line, unless the line is absurdly long: joining
    copies the block, which would make an endless line quadratic.
    """
    if last.is_open:
        return len(last.data) <= 2 * BLOCK_BYTES
    return len(last.data) + num_bytes <= BLOCK_BYTES // 16


def _find_in(block: Block, needle: bytes, line: int | None, backward: bool) -> int | None:
    # bytes.lower folds ASCII only: other letters of the needle match lower case in the log.
    data = block.data.lower()
    if backward:
        ends_before = len(data)
        if line is not None:
            # The start line counts, too: the caller has moved past the match before.
            end_line = min(line + 1, block.num_lines)
            ends_before = int(block.starts[end_line]) if end_line < block.num_lines else len(data)
        found = data.rfind(needle, 0, ends_before)
    else:
        inside = line is not None and line < block.num_lines
        begin = int(block.starts[line]) if inside and line is not None else 0
        found = -1 if line is not None and not inside else data.find(needle, begin)
    if found < 0:
        return None
    return int(np.searchsorted(block.starts, found, side="right")) - 1


def split_blocks(chunks: Iterator[bytes]) -> Iterator[Block]:
    """Yield blocks of whole lines from the chunks of a file; the last one may be open."""
    rest = b""
    for chunk in chunks:
        whole = rest + chunk
        cut = whole.rfind(b"\n") + 1
        rest = whole[cut:]
        if cut:
            yield make_block(whole[:cut])
    if rest:
        yield make_block(rest)

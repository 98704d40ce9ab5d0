"""Read any rows of data files, without reading those before them where the kind of file allows it.

In files with a row per line, the byte offset of every 64th line is kept, which takes a megabyte for
ten million rows. The wanted lines are copied into a small file, which the reader of a run reads:
rows are split and parsed by the same code. Other kinds are read from their beginning.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.shared.data.files import UTF_8, find_kind, find_line_end
from agents.trainer.data.files import FileReading, Raw, read_file

_BLOCK_BYTES = 1 << 24
_LINES_PER_OFFSET = 64
# Lines behind a row of a table that may still belong to it.
_TABLE_LINES = 1000
_MAX_HEADER_BYTES = 1 << 20
_MAX_KEPT = 4000
_UTF8_MARK = b"\xef\xbb\xbf"


class LineFile:
    """Offsets of the lines of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_whole = False
        self.num_lines = 0
        """Number of lines found so far."""
        self._read_bytes = 0
        # The background finds lines while a request needs some.
        self._lock = threading.Lock()
        self._offsets = [0]

    def find_more(self) -> None:
        """Find the lines of the next block."""
        with self._lock, self.path.open("rb") as file:
            self._find_more(file)

    def _find_more(self, file: BinaryIO) -> None:
        if not self.is_whole:
            file.seek(self._read_bytes)
            block = file.read(_BLOCK_BYTES)
            self._add(block)

    def _add(self, block: bytes) -> None:
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        first = -self.num_lines % _LINES_PER_OFFSET
        first = first or _LINES_PER_OFFSET
        marks = ends[first - 1 :: _LINES_PER_OFFSET] + 1 + self._read_bytes
        self._offsets += marks.tolist()
        self.num_lines += len(ends)
        self._read_bytes += len(block)
        if len(block) < _BLOCK_BYTES:
            self.num_lines += bool(block) and not block.endswith(b"\n")
            self.is_whole = True

    def copy_lines(self, first: int, count: int) -> bytes:
        """Return lines as written; `first` counts from 1."""
        while not self.is_whole and self.num_lines < first + count:
            self.find_more()
        place = min((first - 1) // _LINES_PER_OFFSET, len(self._offsets) - 1)
        with self.path.open("rb") as file:
            file.seek(self._offsets[place])
            for _ in range(first - 1 - place * _LINES_PER_OFFSET):
                file.readline()
            return b"".join(file.readline() for _ in range(count))


class RowPlaces:
    """The rows of data files by their places, which count across files as in a run.

    Args:
        paths: the files.
        data: settings of the data.
        folder: private folder for small files.
    """

    def __init__(self, paths: Sequence[Path], data: DataSpec, folder: Path) -> None:
        self._paths = tuple(paths)
        self._data = data
        self._folder = folder
        self._kinds = [find_kind(path, data.encoding) for path in paths]
        self._lines = [LineFile(path) for path in paths] if self._are_lines() else []
        self._kept: dict[int, Any] = {}
        self._next: Iterator[tuple[int, Any]] = self.read_all()
        self._last = 0
        self.starts: list[int] = [0]
        """Place before the first row of each file, as far as known."""

    def _reading(self) -> FileReading:
        return FileReading(documents=self._data.documents, encoding=self._data.encoding)

    def _are_lines(self) -> bool:
        """Return whether each row begins a line of its own in all files."""
        if self._data.encoding != UTF_8:  # others may have the byte of a line end inside of letters
            return False
        by_line = self._data.documents == "line"
        kinds = {"jsonl", "csv", *(["text"] if by_line else [])}
        return all(
            kind in kinds and find_line_end(path, kind if kind != "csv" else "text") == "\n"
            for path, kind in zip(self._paths, self._kinds, strict=True)
        )

    @property
    def counts_by_line(self) -> bool:
        """True if every line is a row, so that rows are known by number before they are read."""
        return bool(self._lines) and "csv" not in self._kinds

    def find_lines(self) -> Iterator[int]:
        """Yield the number of rows found so far, block by block, if every line is one."""
        total = 0
        for file in self._lines:
            while not file.is_whole:
                file.find_more()
                yield total + file.num_lines
            total += file.num_lines
            self._note_start(total)

    def _note_start(self, total: int) -> None:
        if len(self.starts) < len(self._paths) and total > self.starts[-1]:
            self.starts.append(total)

    def note_starts(self, starts: Sequence[int]) -> None:
        """Take over the starts of files that a reader has found."""
        if len(starts) > len(self.starts):
            self.starts = list(starts)

    def locate(self, place: int) -> tuple[int, int]:
        """Return the file of a row, and its number in it."""
        file = max(index for index, start in enumerate(self.starts) if start < place or not index)
        return file, place - self.starts[file]

    def read(self, places: Sequence[int]) -> dict[int, Any]:
        """Return the values of rows by their places, which ascend."""
        found: dict[int, Any] = {}
        left = list(places)
        while left:
            file, number = self.locate(left[0])
            if not self._lines:
                return self._read_on(left)
            end = self.starts[file + 1] if file + 1 < len(self.starts) else left[-1]
            # One pass for rows that lie near each other.
            near = [one for one in left if one <= end and one - left[0] < _TABLE_LINES]
            last = near[-1] - self.starts[file]
            for at, value in self._read_lines(file, number, last):
                if at + self.starts[file] in near:
                    found[at + self.starts[file]] = value
                if at >= last:
                    break
            left = [one for one in left if one not in near]
        return found

    def _read_lines(self, file: int, first: int, last: int) -> Iterator[Raw]:
        path, is_table = self._paths[file], self._kinds[file] == "csv"
        count = last - first + 1 + _TABLE_LINES * is_table
        header, num_header = self._header(file) if is_table else (b"", 0)
        copy = self._folder / f"slice{path.suffix.lower() or '.jsonl'}"
        copy.write_bytes(header + self._lines[file].copy_lines(first, count))
        with _EndOfCopy(is_table):
            for number, value in read_file(copy, self._reading()):
                if number > num_header:
                    yield number - num_header + first - 1, value

    def _header(self, file: int) -> tuple[bytes, int]:
        """Return the lines up to the names of a table's columns, and their number."""
        with self._paths[file].open("rb") as source:
            lines = [source.readline(_MAX_HEADER_BYTES)]
            while lines[-1] and not lines[-1].removeprefix(_UTF8_MARK).strip():
                lines.append(source.readline(_MAX_HEADER_BYTES))
        return b"".join(lines), len(lines)

    def _read_on(self, places: Sequence[int]) -> dict[int, Any]:
        """Read the rows up to these; a step back behind the kept ones begins again."""
        found = {place: self._kept[place] for place in places if place in self._kept}
        missing = {place for place in places if place not in found}
        if missing and min(missing) <= self._last:
            self._kept, self._next, self._last = {}, self.read_all(), 0
        while missing and max(missing) > self._last:
            item = next(self._next, None)
            if item is None:
                break
            self._last = item[0]
            self._kept[item[0]] = item[1]
            if item[0] in missing:
                found[item[0]] = item[1]
            if len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        return found

    def read_all(self) -> Iterator[tuple[int, Any]]:
        """Yield all values with their places, from the beginning."""
        last = 0
        for path in self._paths:
            start = last
            self._note_start(start)
            for number, value in read_file(path, self._reading()):
                last = start + number
                yield last, value

    def search(self, text: str) -> Iterator[int | None]:
        """Yield the places of rows that contain a text in any case, and None now and then."""
        if not self.counts_by_line:
            # As JSON escapes it, too: values are compared as they are shown.
            wanted = text.casefold()
            for place, value in self.read_all():
                is_found = wanted in json.dumps(value, ensure_ascii=False, default=str).casefold()
                yield place if is_found else None
            return
        forms = {text, json.dumps(text)[1:-1]}
        pattern = re.compile(
            b"|".join(re.escape(form.encode("utf-8", "surrogateescape")) for form in forms),
            re.IGNORECASE,
        )
        start = 0
        for path in self._paths:
            number = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield start + number if pattern.search(line) else None
            start += number


class _EndOfCopy:
    """Ignores the error of a row that the copied lines cut off behind the wanted ones."""

    def __init__(self, is_table: bool) -> None:
        self._is_table = is_table

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return self._is_table and isinstance(error, ExpectedError)


def until(limit_s: float) -> Callable[[], bool]:
    """Return a function that is True for `limit_s` seconds from now."""
    end_s = time.monotonic() + limit_s
    return lambda: time.monotonic() < end_s

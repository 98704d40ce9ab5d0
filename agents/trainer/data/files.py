"""Read data files row by row, without holding a whole file in memory.

Supports `.jsonl`, `.json` (a list, consecutive objects, or one object around a list; only the last
is held as a whole), `.csv`, `.tsv`, `.txt` with one row per line, and `.parquet`. Invalid UTF-8
becomes lone surrogates, which are detected when the text is parsed: one bad byte costs its row, not
the file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from agents.contract.spec import Documents
from agents.errors import ExpectedError, explain_os_error
from agents.shared.data.columns import KNOWN_KEYS, find_rows_inside
from agents.shared.data.files import (
    LONG_LINE,
    MAX_LINE_CHARS,
    UTF_8,
    TableLines,
    UnreadableData,
    explain_bad_json,
    explaining_bytes,
    find_delimiter,
    find_kind,
    find_line_end,
    open_text,
    read_lines,
    read_page,
)
from agents.shared.data.reshape import unfold
from agents.trainer.data.parquet_reader import UnreadColumn, read_parquet

Raw = tuple[int, Any]
"""Line or index from 1, and the value: an object, None for an empty line, or ValueError."""
_MAX_CSV_FIELD = MAX_LINE_CHARS
_BLOCK_CHARS = 1 << 20
# Longest object in a JSON list, or around one, in characters. Python's objects take up to 30 times
# as many bytes.
_MAX_CHARS = 1 << 25
# Separators between values. Commas are optional, since objects may follow each other directly.
_GAP = re.compile(r"[ \t\r\n,]*")


@dataclass(slots=True)
class FileReading:
    """Progress of reading."""

    done_bytes: int = 0
    """Bytes read from disk so far; some count twice."""
    unread: list[UnreadColumn] = field(default_factory=list)
    """Columns whose values are not read."""
    documents: Documents = "file"
    """Unit of a text file that is one row."""
    num_documents: int = 0
    """Number of documents of text files read so far."""
    encoding: str = UTF_8
    """Encoding of text files."""
    unfolds_each: bool = False
    """True if every object around a list of rows is unfolded, as by rules before version 3."""


def read_file(path: Path, reading: FileReading | None = None) -> Iterator[Raw]:
    """Yield the rows of one file.

    Args:
        path: the file.
        reading: progress to update while reading.

    Raises:
        ExpectedError: the file cannot be read, or cannot be split into rows.
    """
    reading = reading or FileReading()
    with _explaining_errors(path), explaining_bytes(path, reading.encoding):
        kind = find_kind(path, reading.encoding)
        if kind == "parquet":
            yield from _read_parquet(path, reading)
            return
        ends = find_line_end(path, kind)
        with _open(path, reading, newline=ends) as file:
            if kind == "jsonl":
                yield from _read_json_lines(read_lines(path, file, ends))
            elif kind == "json":
                yield from _read_json(path, file, reading)
            elif kind in ("text", "html"):
                lines = read_lines(path, file, ends) if kind == "text" else read_page(path, file)
                for row in _read_text(lines, reading.documents):
                    reading.num_documents += row[1] is not None
                    yield row
        if kind == "csv":
            yield from _read_csv(path, reading)


class _CountedFile(io.FileIO):
    """Counts the bytes read from disk."""

    def __init__(self, path: Path, reading: FileReading) -> None:
        super().__init__(path)
        self._reading = reading

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        self._reading.done_bytes += count or 0
        return count


def _open(path: Path, reading: FileReading, *, newline: str) -> TextIO:
    buffered = io.BufferedReader(_CountedFile(path, reading), _BLOCK_CHARS)
    return open_text(buffered, reading.encoding, newline=newline)


@contextlib.contextmanager
def _explaining_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnreadableData as error:
        raise ExpectedError(f"{error}.", error.hint) from error
    except FileNotFoundError as error:
        raise ExpectedError(
            f"{path} does not exist.", "Check data.train of the run file"
        ) from error
    except OSError as error:
        raise explain_os_error(error, f"reading {path}") from error


def _read_text(lines: Iterable[str | None], documents: Documents) -> Iterator[Raw]:
    """Yield each document with the number of its first line."""
    kept: list[str] = []
    num_chars = 0
    for number, line in enumerate(lines, start=1):
        if line is None:
            yield number, ValueError(LONG_LINE)
            continue
        if documents == "line":
            text = line.rstrip("\r\n")
            yield number, {"text": text} if text.strip() else None
            continue
        text = line.rstrip("\r\n")
        ends = documents == "blank-line" and not text.strip()
        # A huge file is several documents, since one is held in memory.
        if kept and (ends or num_chars + len(text) > _MAX_CHARS):
            yield number - len(kept), _join_lines(kept)
            kept, num_chars = [], 0
        if kept or text.strip():
            kept.append(text)
            num_chars += len(text)
    if kept:
        yield number - len(kept) + 1, _join_lines(kept)


def _join_lines(lines: list[str]) -> dict[str, str]:
    return {"text": "\n".join(lines).rstrip("\n")}


def _read_json_lines(lines: Iterator[str | None]) -> Iterator[Raw]:
    for number, line in enumerate(lines, start=1):
        if line is None:
            yield number, ValueError(LONG_LINE)
            continue
        text = line.rstrip("\r\n")
        yield number, _parse(text) if text.strip() else None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not valid JSON: {explain_bad_json(error)}")


def _read_json(path: Path, file: TextIO, reading: FileReading) -> Iterator[Raw]:
    line = "\n"
    while line and not line.strip():
        line = file.readline(_BLOCK_CHARS)
    if line.lstrip().startswith("{") and isinstance(_parse(line), dict):
        # After seeking, the utf-8-sig decoder may return the byte order mark.
        file.seek(0)
        if file.read(1) != "\ufeff":
            file.seek(0)
        rows = _read_json_lines(read_lines(path, file, "\n"))
        yield from _unfold_each(rows) if reading.unfolds_each else unfold(rows)
    elif line:
        rows, is_list = _read_json_values(path, line, file), line.lstrip().startswith("[")
        if reading.unfolds_each:
            rows = _unfold_each(rows)
        elif not is_list:
            rows = unfold(rows)
        yield from rows


def _unfold_each(rows: Iterator[Raw]) -> Iterator[Raw]:
    """Yield the rows inside objects such as {"version": 1, "data": [{...}, {...}]}."""
    num_inside = 0
    for number, value in rows:
        inside = find_rows_inside(value)
        if inside is None:
            yield number, value
            continue
        for row in inside:
            num_inside += 1
            yield num_inside, row


def _read_json_values(path: Path, start: str, file: TextIO) -> Iterator[Raw]:
    """Yield the values of a list, or consecutive values."""
    decoder = json.JSONDecoder()
    text = start.lstrip()
    is_list = text.startswith("[")
    if not is_list and not text.startswith("{"):
        raise ExpectedError(f"{path} holds no list of rows.", "Write [{...}, {...}] or use .jsonl")
    place, number, ended = int(is_list), 0, False
    while True:
        place = _GAP.match(text, place).end()  # type: ignore[union-attr] # it also matches an empty text
        if is_list and text.startswith("]", place):
            _expect_end(path, number + 1, text[place + 1 :], file)
            return
        if ended and place == len(text):
            if is_list:
                raise _broken(path, number + 1, "the list has no end")
            return
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            # Usually the value continues in the next block. Each read doubles the text, so that a
            # long value is not parsed again for every block.
            may_continue = isinstance(error, json.JSONDecodeError) and not ended
            if may_continue and len(text) - place > _MAX_CHARS:
                raise _too_long(path, number + 1) from error
            if not may_continue:
                raise _broken(path, number + 1, explain_bad_json(error)) from error
            block = file.read(max(_BLOCK_CHARS, len(text) - place))
            text, place, ended = text[place:] + block, 0, not block
            continue
        if not isinstance(value, (dict, list)) and end == len(text) and not ended:
            block = file.read(_BLOCK_CHARS)  # a number may continue in the next block
            text, place, ended = text[place:] + block, 0, not block
            continue
        number, place = number + 1, end
        yield number, value


def _expect_end(path: Path, number: int, text: str, file: TextIO) -> None:
    """Raise if text follows a list, since it would be ignored silently."""
    while text:
        if text.strip():
            raise _broken(path, number, "more follows the end of the list")
        text = file.read(_BLOCK_CHARS)


def _too_long(path: Path, number: int) -> ExpectedError:
    return ExpectedError(
        f"{path}, row {number}: it does not end within {_MAX_CHARS:,} characters.",
        "Write one row per line (.jsonl). Nothing was trained",
    )


def _broken(path: Path, number: int, reason: str) -> ExpectedError:
    return ExpectedError(
        f"{path}, row {number}: not valid JSON: {reason}.",
        "Correct it: the rows after it cannot be separated. Nothing was trained",
    )


def _read_csv(path: Path, reading: FileReading) -> Iterator[Raw]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    delimiter = find_delimiter(path, reading.encoding)
    names: list[str] = []
    start = 1
    with _open(path, reading, newline="") as file:
        lines = TableLines(path, read_lines(path, file, ""))
        reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
        try:
            for fields in reader:
                lines.begin_row()
                if not any(field.strip() for field in fields):
                    yield start, None
                elif not names:
                    names = [name.strip() for name in fields]
                    _refuse_doubled(path, names)
                elif len(fields) != len(names):
                    counted = f"{len(fields)} fields, but the first line names {len(names)} columns"
                    yield start, ValueError(counted)
                else:
                    yield start, dict(zip(names, fields, strict=True))
                start = reader.line_num + 1
        except csv.Error as error:
            raise ExpectedError(
                f"{path}, line {start}: not valid CSV: {error}.",
                f"Correct line {start}: the rows after it cannot be separated. Nothing was trained",
            ) from error


def _refuse_doubled(path: Path, names: Sequence[str]) -> None:
    doubled = [name for name, count in Counter(names).items() if count > 1 and name in KNOWN_KEYS]
    if doubled:
        raise ExpectedError(
            f"{path} has more than one column '{doubled[0]}'.",
            "Rename all but one of them: a row has one text of a name. Nothing was trained",
        )


def _read_parquet(path: Path, reading: FileReading) -> Iterator[Raw]:
    with path.open("rb"):  # this system error says more than the child's
        before, size = reading.done_bytes, path.stat().st_size
    rows = read_parquet(path, reading.unread)
    with contextlib.closing(rows):  # type: ignore[type-var] # a generator
        for number, (value, share) in enumerate(rows, start=1):
            yield number, value
            reading.done_bytes = before + int(size * share)

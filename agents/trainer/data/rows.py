"""Read the rows of a data file, with nothing but the standard library.

Files: `.jsonl`, `.json` (a list, or one object per line), `.csv`, `.tsv`, and `.txt` with one row
per line. A row that is broken ends the reading with an error that names file, line and reason: data
that is wrong is for a person to look at. A row that is merely empty is left out and counted.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.errors import UserError, explain_os_error
from agents.trainer.data.conversations import Row, choose_format, read_row

_MAX_CSV_FIELD = 1 << 27
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_KINDS |= {".txt": "text", ".text": "text", ".md": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row that was left out."""

    row: int
    """Line of the file, or place in its list, from 1."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFile:
    """What a data file holds."""

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    format: str
    """`chat`, `alpaca` or `text`: as asked for, or as found."""


def read_rows(path: Path, data_format: str) -> RowFile:
    """Read and check every row of the file.

    Raises:
        UserError: the file cannot be read, a row is broken, or no row is left.
    """
    text = _read_text(path)
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for number, value in _parse(path, text):
        if value is None:
            skipped.append(Skipped(row=number, reason="the line is empty"))
            continue
        try:
            if data_format == "auto":
                data_format = choose_format(value)
            row = read_row(number, value, data_format)
        except ValueError as error:
            raise _broken(path, number, str(error)) from error
        if isinstance(row, str):
            skipped.append(Skipped(row=number, reason=row))
        else:
            rows.append(row)
    if not rows:
        raise _no_rows(path, skipped)
    return RowFile(rows=tuple(rows), skipped=tuple(skipped), format=data_format)


def _no_rows(path: Path, skipped: list[Skipped]) -> UserError:
    hint = "Give a file with at least one row to learn from"
    if not skipped:
        return UserError(f"{path} is empty.", hint)
    first = skipped[0]
    return UserError(
        f"{path} has no usable row: all {len(skipped)} were left out "
        f"(the first, row {first.row}: {first.reason}).",
        hint,
    )


def _broken(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"{path}, line {number}: {reason}.",
        f"Correct or delete line {number}; nothing was trained",
    )


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a folder.", "Name one data file in it")
    if path.suffix.lower() == ".parquet":
        raise UserError(
            f"{path} is a Parquet file, which this version does not read.",
            "Save it as JSON lines: pandas.read_parquet(...).to_json(..., orient='records', "
            "lines=True)",
        )
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.", "Check data.train of the run file") from error
    except OSError as error:
        raise explain_os_error(error, f"reading {path}") from error
    if data.startswith(_UTF16_MARKS):
        raise UserError(f"{path} is UTF-16 text.", "Save it as UTF-8 and start again")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{data[error.start]:02x} is not UTF-8 text"
        raise _broken(path, line, reason) from error


def _parse(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield line or place, and the parsed value; None for an empty line."""
    kind = _KINDS.get(path.suffix.lower()) or _guess_kind(path, text)
    if kind == "jsonl":
        return _parse_json_lines(path, text)
    if kind == "json":
        return _parse_json(path, text)
    if kind == "csv":
        return _parse_csv(path, text)
    return _parse_lines(text)


def _guess_kind(path: Path, text: str) -> str:
    start = text.lstrip()[:1]
    if start in ("{", "["):
        return "jsonl" if start == "{" else "json"
    raise UserError(
        f"{path}: '{path.suffix}' is not a kind of data file that Rackless reads.",
        "Use .jsonl, .json, .csv, .tsv or .txt",
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Only \n ends a line: str.splitlines would also cut at U+2028, which JSON allows in a string.
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield number, line.rstrip("\r")


def _parse_lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(text):
        yield number, {"text": line} if line.strip() else None


def _parse_json_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(text):
        if not line.strip():
            yield number, None
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _broken(path, number, f"not valid JSON: {_say(error)}") from error


def _say(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parse_json(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            yield from _parse_json_lines(path, text)
            return
        if not text.strip():
            return
        raise _broken(path, error.lineno, f"not valid JSON: {_say(error)}") from error
    except RecursionError as error:
        raise _broken(path, 1, f"not valid JSON: {_say(error)}") from error
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise UserError(f"{path} holds no list of rows.", "Write [{...}, {...}] or use .jsonl")
    yield from enumerate(value, start=1)


def _parse_csv(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    start = 1
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                yield start, None
            elif not names:
                names = [name.strip() for name in fields]
            elif len(fields) != len(names):
                reason = f"{len(fields)} fields, but the first line names {len(names)} columns"
                raise _broken(path, start, reason)
            else:
                yield start, dict(zip(names, fields, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise _broken(path, start, f"not valid CSV: {error}") from error

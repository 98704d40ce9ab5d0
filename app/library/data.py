"""Find a data file and look it over before any node is asked.

The look is at form only (encoding, JSON, columns), line by line, so that a broken line is named at
once and on this PC; what a row means is the trainer's business.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

from app.errors import NotAvailableYet, UserError
from app.library.bundles import Source, make_bundle
from app.storage.hashes import HashStore

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
_NO_START = "Correct the file; nothing was started."


def find_data(name: str, key: str, hashes: HashStore) -> Source:
    """Return the bundle of one data file, once its form was looked over.

    Args:
        name: the path as the run file gives it.
        key: the run file's key, `data.train` or `data.eval`, for messages.

    Raises:
        UserError: there is no such file, it is of another kind, or a line is broken.
        NotAvailableYet: it names a data set of the hub.
    """
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        raise UserError(f"{key} is the folder {name}", "Name one data file in it.")
    if not path.is_file():
        if name.count("/") == 1 and not Path(name).suffix and not name.startswith((".", "~", "/")):
            raise NotAvailableYet(
                f"{key} is {name}: data sets of the hub are not available yet",
                "Save it as JSON lines and name that file.",
            )
        raise UserError(
            f"the data file {name} ({key}) does not exist",
            "Give its path relative to the run file, or the whole path.",
        )
    check_form(path)
    return make_bundle("data", path.stem, path.parent, [path], hashes, member=path.name)


def check_form(path: Path) -> None:
    """Read a data file once and refuse what no trainer could read.

    Raises:
        UserError: naming the file, the line and the reason.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            _check_lines(path, file)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text in UTF-8 ({error.reason})", "Save it as UTF-8."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "Check the path.") from error


def _check_lines(path: Path, file: Iterable[str]) -> None:
    suffix = path.suffix.lower()
    if suffix in LINE_SUFFIXES:
        num_rows = _check_json_lines(path, file)
    elif suffix == ".json":
        num_rows = _check_json(path, "".join(file))
    elif suffix in TABLE_SUFFIXES:
        num_rows = _check_table(path, file)
    elif suffix in TEXT_SUFFIXES:
        num_rows = sum(1 for line in file if line.strip())
    else:
        raise UserError(
            f"{path}: '{suffix}' is not a kind of data file that Rackless reads yet",
            "Use .jsonl, .json, .csv, .tsv or .txt.",
        )
    if not num_rows:
        raise UserError(f"{path} is empty", "Give a file with at least one row to learn from.")


def _check_json_lines(path: Path, lines: Iterable[str]) -> int:
    num_rows = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            raise _broken(path, number, f"not valid JSON: {_reason(error)}") from error
        if not isinstance(row, dict):
            raise _broken(path, number, "a row is not an object such as {...}")
        num_rows += 1
    return num_rows


def _check_json(path: Path, text: str) -> int:
    try:
        value = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            return _check_json_lines(path, text.split("\n"))
        raise _broken(path, error.lineno, f"not valid JSON: {_reason(error)}") from error
    except RecursionError as error:
        raise _broken(path, 1, "not valid JSON: nested too deeply") from error
    if isinstance(value, dict):
        return 1
    if not isinstance(value, list):
        raise UserError(f"{path} holds no list of rows", "Write [{...}, {...}] or use .jsonl.")
    return len(value)


def _check_table(path: Path, lines: Iterable[str]) -> int:
    csv.field_size_limit(1 << 27)
    rows = iter(lines)
    header = next(rows, "")
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(_chain(header, rows), delimiter=delimiter, strict=True)
    num_columns = 0
    num_rows = 0
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if num_columns and len(fields) != num_columns:
                reason = f"{len(fields)} fields, but the first line names {num_columns} columns"
                raise _broken(path, reader.line_num, reason)
            num_rows += bool(num_columns)
            num_columns = num_columns or len(fields)
    except csv.Error as error:
        raise _broken(path, reader.line_num, f"not valid CSV: {error}") from error
    return num_rows


def _chain(first: str, rest: Iterable[str]) -> Iterable[str]:
    yield first
    yield from rest


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _broken(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path}, line {number}: {reason}", _NO_START)

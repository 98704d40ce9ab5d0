"""Find data and look it over before any node is asked.

The look is at form only (encoding, JSON, columns), line by line, on this PC. As on the nodes a few
broken rows are left out there and counted; what is broken for the most part is refused at once,
with its first line. What a row means is the trainer's business.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

from app.errors import UserError
from app.library.bundles import Source, make_bundle
from app.storage.hashes import HashStore

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
ALL_SUFFIXES = LINE_SUFFIXES | TABLE_SUFFIXES | TEXT_SUFFIXES | {".json", ".parquet"}
MOST_BROKEN = 10
MOST_BROKEN_SHARE = 0.05
"""Above both, data is refused; `agents.trainer.data.tally` has the same rule for meaning."""
_NO_START = "Correct the file; nothing was started."
_LARGE_JSON_BYTES = 256 << 20
_NOT_DATA = ("readme", "license", "dataset_info", "manifest.json", "state.json")


def find_data(name: str, key: str, hashes: HashStore) -> Source:
    """Return the bundle of a data file or folder, once its form was looked over.

    A data set of the hub (`org/name`) is fetched by the nodes themselves.

    Args:
        name: the path as the run file gives it, or a hub id.
        key: the run file's key, `data.train` or `data.eval`, for messages.

    Raises:
        UserError: there is no such file, it is of another kind, or it is broken.
    """
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _find_folder(path, hashes)
    if not path.is_file():
        plain = name.startswith((".", "~", "/")) or Path(name).suffix.lower() in ALL_SUFFIXES
        if name.count("/") == 1 and not plain:
            return Source(value=name)
        raise UserError(
            f"the data file {name} ({key}) does not exist",
            "Give its path relative to the run file, or the whole path.",
        )
    check_form(path)
    return make_bundle("data", path.stem, path.parent, [path], hashes, member=path.name)


def _find_folder(folder: Path, hashes: HashStore) -> Source:
    files = [path for path in sorted(folder.rglob("*")) if _is_data(path, folder)]
    if not files:
        raise UserError(
            f"{folder} holds no data file", "Use .jsonl, .json, .csv, .tsv, .txt or .parquet."
        )
    for path in files:
        check_form(path)
    return make_bundle("data", folder.name, folder, files, hashes)


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith(".") for part in parts)
    named = path.name.lower().startswith(_NOT_DATA)
    return not hidden and not named and path.suffix.lower() in ALL_SUFFIXES and path.is_file()


def check_form(path: Path) -> None:
    """Read a data file once and refuse what no trainer could read.

    Raises:
        UserError: naming the file, the line and the reason.
    """
    try:
        if path.suffix.lower() == ".parquet":
            _check_parquet(path)
            return
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if file.read(1) in ("\udcff", "\udcfe"):
                raise UserError(f"{path} is not text in UTF-8", "Save it as UTF-8.")
            file.seek(0)
            _check_lines(path, file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "Check the path.") from error


def _check_parquet(path: Path) -> None:
    with path.open("rb") as file:
        starts = file.read(4) == b"PAR1"
        whole = starts and path.stat().st_size >= 12 and file.seek(-4, 2) and file.read() == b"PAR1"
    if not whole:
        raise UserError(f"{path} is no whole Parquet file", "Write or copy it again.")


class _Broken:
    """Counts broken rows and keeps the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num = 0
        self._first: UserError | None = None

    def add(self, number: int, reason: str) -> None:
        self._num += 1
        self._first = self._first or _broken(self._path, number, reason)

    def judge(self, num_whole: int) -> int:
        """Return the number of rows, those broken too.

        Raises:
            UserError: too many are broken; it names the first.
        """
        num_rows = num_whole + self._num
        too_many = max(MOST_BROKEN, MOST_BROKEN_SHARE * num_rows)
        if self._first and (self._num > too_many or not num_whole):
            raise self._first
        return num_rows


def _check_lines(path: Path, file: Iterable[str]) -> None:
    suffix = path.suffix.lower()
    if suffix in LINE_SUFFIXES:
        num_rows = _check_json_lines(path, file)
    elif suffix == ".json":
        if path.stat().st_size > _LARGE_JSON_BYTES:
            return  # too much to hold here; the trainer reads it as a stream
        num_rows = _check_json(path, "".join(file))
    elif suffix in TABLE_SUFFIXES:
        num_rows = _check_table(path, file)
    elif suffix in TEXT_SUFFIXES:
        num_rows = sum(1 for line in file if line.strip())
    else:
        raise UserError(
            f"{path}: '{suffix}' is not a kind of data file that Rackless reads",
            "Use .jsonl, .json, .csv, .tsv, .txt or .parquet.",
        )
    if not num_rows:
        raise UserError(f"{path} is empty", "Give a file with at least one row to learn from.")


def _check_json_lines(path: Path, lines: Iterable[str]) -> int:
    num_whole = 0
    broken = _Broken(path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            broken.add(number, f"not valid JSON: {_reason(error)}")
            continue
        if isinstance(row, dict):
            num_whole += 1
        else:
            broken.add(number, "a row is not an object such as {...}")
    return broken.judge(num_whole)


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
    broken = _Broken(path)
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if num_columns and len(fields) != num_columns:
                reason = f"{len(fields)} fields, but the first line names {num_columns} columns"
                broken.add(reader.line_num, reason)
                continue
            num_rows += bool(num_columns)
            num_columns = num_columns or len(fields)
    except csv.Error as error:
        raise _broken(path, reader.line_num, f"not valid CSV: {error}") from error
    return broken.judge(num_rows)


def _chain(first: str, rest: Iterable[str]) -> Iterable[str]:
    yield first
    yield from rest


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _broken(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path}, line {number}: {reason}", _NO_START)

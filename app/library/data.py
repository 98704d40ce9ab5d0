"""Find data and look it over before any node is asked.

The look is at form only (encoding, JSON, columns), line by line, on this PC. As on the nodes a few
broken rows are left out there and counted; what is broken for the most part is refused at once,
with its first line. What a row means is the trainer's business. Files are told apart and cut into
rows as `agents.trainer.data.files` does it, so that nothing is refused here that can be trained.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

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
_MOST_LINE_CHARS = 1 << 20
"""Of the first line of a `.json` file that has a row in each line."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BLANK = re.compile(r"\s*")
_GAP = re.compile(r"[ \t\r\n,]*")
_NO_OBJECT = "a row is not an object such as {...}"
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
        kind = _find_kind(path)
        if kind == "parquet":
            _check_parquet(path)
        elif _count_rows(path, kind) == 0:
            raise UserError(f"{path} is empty", "Give a file with at least one row to learn from.")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "Check the path.") from error


def _find_kind(path: Path) -> str:
    """Return how a file is cut into rows; one of another suffix is looked into, and may be JSON."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(_UTF16_MARKS):
        raise UserError(f"{path} is not text in UTF-8", "Save it as UTF-8.")
    suffix = path.suffix.lower()
    kinds = {"lines": LINE_SUFFIXES, "table": TABLE_SUFFIXES, "text": TEXT_SUFFIXES}
    kinds |= {"json": frozenset({".json"}), "parquet": frozenset({".parquet"})}
    for kind, suffixes in kinds.items():
        if suffix in suffixes:
            return kind
    if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "json"
    raise UserError(
        f"{path}: '{suffix}' is not a kind of data file that Rackless reads",
        "Use .jsonl, .json, .csv, .tsv, .txt or .parquet.",
    )


def _count_rows(path: Path, kind: str) -> int | None:
    """Return the number of rows, those broken too; None: too large to be looked over."""
    with _open(path, newline="" if kind == "table" else "\n") as file:
        if kind == "table":
            return _check_table(path, file)
        if kind == "text":
            return sum(1 for line in file if line.strip())
        if kind == "lines" or _has_row_per_line(path):
            return _check_json_lines(path, file)
        if path.stat().st_size > _LARGE_JSON_BYTES:
            return None  # too much to hold here; the trainer reads it as a stream
        return _check_json(path, file.read())


def _open(path: Path, newline: str) -> TextIO:
    # Bytes that are no UTF-8 cost their row on the nodes, not the file.
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


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

    def judge(self, num_whole: int, num_blank: int = 0) -> int:
        """Return the number of rows, those broken too.

        Raises:
            UserError: too many are broken of all, empty lines too; it names the first.
        """
        num_rows = num_whole + self._num
        too_many = max(MOST_BROKEN, MOST_BROKEN_SHARE * (num_rows + num_blank))
        if self._first and (self._num > too_many or not num_whole):
            raise self._first
        return num_rows


def _check_json_lines(path: Path, lines: Iterable[str]) -> int:
    num_whole = num_blank = 0
    broken = _Broken(path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            num_blank += 1
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            broken.add(number, f"not valid JSON: {_reason(error)}")
            continue
        if isinstance(row, dict):
            num_whole += 1
        else:
            broken.add(number, _NO_OBJECT)
    return broken.judge(num_whole, num_blank)


def _has_row_per_line(path: Path) -> bool:
    """Tell whether the first line of a `.json` file is an object of its own."""
    line = "\n"
    with _open(path, newline="\n") as file:
        while line and not line.strip():
            line = file.readline(_MOST_LINE_CHARS)
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _check_json(path: Path, text: str) -> int:
    """Look over a list, or objects that stand one after the other."""
    decoder = json.JSONDecoder()
    start = _end_of(_BLANK, text, 0)
    if start == len(text):
        return 0
    if text[start] not in "[{":
        raise UserError(f"{path} holds no list of rows", "Write [{...}, {...}] or use .jsonl.")
    is_list = text[start] == "["
    num_whole, line, counted = 0, 1, 0
    broken = _Broken(path)
    place = _end_of(_GAP, text, start + is_list)
    while place < len(text) and not (is_list and text[place] == "]"):
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            number = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _broken(path, number, f"not valid JSON: {_reason(error)}") from error
        if isinstance(value, dict):
            num_whole += 1
        else:
            broken.add(line, _NO_OBJECT)
        place = _end_of(_GAP, text, place)
    if is_list and place == len(text):
        number = 1 + text.count("\n")
        raise _broken(path, number, "not valid JSON: the list has no end")
    return broken.judge(num_whole)


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _check_table(path: Path, lines: Iterable[str]) -> int:
    csv.field_size_limit(1 << 27)
    rows = iter(lines)
    header = next(rows, "")
    is_tabbed = path.suffix.lower() == ".tsv"
    delimiter = "\t" if is_tabbed else max(",;\t", key=header.count)
    reader = csv.reader(_chain(header, rows), delimiter=delimiter, strict=True)
    num_columns = num_rows = num_blank = 0
    broken = _Broken(path)
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                num_blank += 1
                continue
            if num_columns and len(fields) != num_columns:
                reason = f"{len(fields)} fields, but the first line names {num_columns} columns"
                broken.add(reader.line_num, reason)
                continue
            num_rows += bool(num_columns)
            num_columns = num_columns or len(fields)
    except csv.Error as error:
        raise _broken(path, reader.line_num, f"not valid CSV: {error}") from error
    return broken.judge(num_rows, num_blank)


def _chain(first: str, rest: Iterable[str]) -> Iterable[str]:
    yield first
    yield from rest


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits"  # https://docs.python.org/3/library/json.html#json.loads


def _broken(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path}, line {number}: {reason}", _NO_START)

"""Find data and validate its form before any node is involved.

Only the form (encoding, JSON, columns) is checked, line by line, on this PC. As on the nodes, a few
broken rows are skipped and counted; data that is mostly broken is refused at once, with its first
broken line. The meaning of a row is up to the trainer. Files are recognized and split into rows as
`agents.trainer.data.files` does, so that nothing is refused here that can be trained.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TextIO

from agents.contract.data_files import KINDS, Misfit, find_kind, find_line_end, look_through
from app.errors import UserError
from app.library.bundles import Source, make_bundle
from app.storage.hashes import HashStore
from app.text import shorten

MOST_BROKEN = 10
MOST_BROKEN_SHARE = 0.05
"""Data with more broken rows than both bounds is refused, as in `agents.trainer.data.tally`."""
_NO_START = "Correct the file; nothing was started."
# Larger `.json` files are not parsed here: they would take gigabytes of memory.
_LARGE_JSON_BYTES = 256 << 20
# Maximum length of the first line of a `.json` file with a row per line, in characters.
_MOST_LINE_CHARS = 1 << 20
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_BLANK = re.compile(r"\s*")
_GAP = re.compile(r"[ \t\r\n,]*")
_NO_OBJECT = "a row is not an object such as {...}"


def is_hub_data(name: str) -> bool:
    """Return whether a name that is not a file here can be a data set of the hub.

    >>> is_hub_data("org/name"), is_hub_data("data/chats.jsonl"), is_hub_data("chats")
    (True, False, False)
    """
    plain = name.startswith((".", "~", "/")) or Path(name).suffix.lower() in KINDS
    return _HUB_ID.fullmatch(name) is not None and not plain


def explain_missing_data(name: str) -> str:
    """Return why a name cannot be data, without opening it; empty: it can."""
    try:
        is_here = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, not valid in a path
        is_here = False
    if is_here or is_hub_data(name):
        return ""
    return "There is no such file or folder on this PC."


def find_data(name: str, key: str, hashes: HashStore) -> Source:
    """Validate a data file or folder and return its bundle.

    Nodes download a data set of the hub (`org/name`) themselves.

    Args:
        name: path as the run file gives it, or a hub id.
        key: key of the run file, `data.train` or `data.eval`, for messages.

    Raises:
        UserError: there is no such file, its kind is not supported, or it is broken.
    """
    if explain_missing_data(name):
        raise _no_such_file(name, key)
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _find_folder(path, hashes)
    if not path.is_file():
        if is_hub_data(name):
            return Source(value=name)
        raise _no_such_file(name, key)  # a device, say
    check_form(path)
    return make_bundle("data", path.stem, path.parent, [path], hashes, member=path.name)


def _no_such_file(name: str, key: str) -> UserError:
    return UserError(
        f"the data file {shorten(name)} ({key}) does not exist",
        "Give its path relative to the run file, or the whole path.",
    )


def _find_folder(folder: Path, hashes: HashStore) -> Source:
    try:
        found = look_through(folder)
    except OSError as error:
        text = f"{folder} cannot be read: {error.strerror}: {error.filename}"
        raise UserError(text, "Name a folder that holds the data alone.") from error
    if found.packed is not None:
        raise UserError(
            f"{found.packed} is compressed and would be left out",
            "Unpack it, or take it out of the folder.",
        )
    if not found.data:
        raise UserError(
            f"{folder} holds no data file", "Use .jsonl, .json, .csv, .tsv, .txt or .parquet."
        )
    check_form(*found.data)
    return make_bundle("data", folder.name, folder, found.data, hashes)


def check_form(*paths: Path) -> None:
    """Read data files once and refuse what the trainer could not read.

    Raises:
        UserError: naming the file, the line and the reason.
    """
    count = _RowCount()
    for path in paths:
        try:
            kind = find_kind(path)
            if kind == "parquet":
                _check_parquet(path)
                count.num_whole += 1
            else:
                _count_rows(path, kind, count)
        except Misfit as misfit:
            raise UserError(str(misfit), f"{misfit.hint}.") from misfit
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror}", "Check the path."
            ) from error
    count.judge()
    if not count.num_whole:
        is_or_are = "is" if len(paths) == 1 else "and all other data files beside it are"
        raise UserError(
            f"{paths[0]} {is_or_are} empty", "Give a file with at least one row to learn from."
        )


def _count_rows(path: Path, kind: str, count: _RowCount) -> None:
    with _open(path, newline=find_line_end(path, kind)) as file:
        if kind == "csv":
            _check_table(path, file, count)
        elif kind == "text":
            count.num_whole += sum(1 for line in file if line.strip())
        elif kind == "jsonl" or _has_row_per_line(path):
            _check_json_lines(path, file, count)
        elif path.stat().st_size > _LARGE_JSON_BYTES:
            count.num_whole += 1  # too large to hold here; the trainer streams it
        else:
            _check_json(path, file.read(), count)


def _open(path: Path, newline: str) -> TextIO:
    # On the nodes bytes that are not UTF-8 invalidate their row, not the file.
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _check_parquet(path: Path) -> None:
    with path.open("rb") as file:
        starts = file.read(4) == b"PAR1"
        # The magic number also ends the file, so a truncated copy lacks it.
        whole = starts and path.stat().st_size >= 12 and file.seek(-4, 2) and file.read() == b"PAR1"
    if not whole:
        raise UserError(f"{path} is not a complete Parquet file", "Write or copy it again.")


class _RowCount:
    """Counter of rows over all files that keeps the first broken one."""

    def __init__(self) -> None:
        self.num_whole = 0
        self.num_blank = 0
        self._num_broken = 0
        self._first: UserError | None = None

    def add_broken(self, path: Path, number: int, reason: str) -> None:
        self._num_broken += 1
        self._first = self._first or _broken(path, number, reason)

    def judge(self) -> None:
        """Check that not too many rows are broken.

        Raises:
            UserError: too many are; it names the first.
        """
        num_rows = self.num_whole + self._num_broken + self.num_blank
        too_many = max(MOST_BROKEN, MOST_BROKEN_SHARE * num_rows)
        # With no whole row at all, the first broken one says more than that the file is empty.
        if self._first and (self._num_broken > too_many or not self.num_whole):
            raise self._first


def _check_json_lines(path: Path, lines: Iterable[str], count: _RowCount) -> None:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            count.num_blank += 1
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            count.add_broken(path, number, f"not valid JSON: {_reason(error)}")
            continue
        if isinstance(row, dict):
            count.num_whole += 1
        else:
            count.add_broken(path, number, _NO_OBJECT)


def _has_row_per_line(path: Path) -> bool:
    """Return whether the first line of a `.json` file is a complete object."""
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


def _check_json(path: Path, text: str, count: _RowCount) -> None:
    """Check a list of objects, or objects one after the other."""
    decoder = json.JSONDecoder()
    start = _end_of(_BLANK, text, 0)
    if start == len(text):
        return
    if text[start] not in "[{":
        raise UserError(f"{path} holds no list of rows", "Write [{...}, {...}] or use .jsonl.")
    is_list = text[start] == "["
    line, counted = 1, 0
    place = _end_of(_GAP, text, start + is_list)
    while place < len(text) and not (is_list and text[place] == "]"):
        # Counted on from the last place: from the start each time would take quadratic time.
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            number = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _broken(path, number, f"not valid JSON: {_reason(error)}") from error
        if isinstance(value, dict):
            count.num_whole += 1
        else:
            count.add_broken(path, line, _NO_OBJECT)
        place = _end_of(_GAP, text, place)
    if is_list and place == len(text):
        number = 1 + text.count("\n")
        raise _broken(path, number, "not valid JSON: the list has no end")
    if is_list and text[place + 1 :].strip():
        number = 1 + text.count("\n", 0, _end_of(_BLANK, text, place + 1))
        raise _broken(path, number, "not valid JSON: more follows the end of the list")


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _check_table(path: Path, lines: Iterable[str], count: _RowCount) -> None:
    # A limit of the whole process; its default of 128 KiB is too short for chats.
    csv.field_size_limit(1 << 27)
    rows = iter(lines)
    first = []
    for line in rows:
        first.append(line)
        if line.strip():
            break
    # The delimiter is guessed from the header alone: the texts below are full of commas.
    is_tabbed = path.suffix.lower() == ".tsv"
    delimiter = "\t" if is_tabbed else max(",;\t", key="".join(first).count)
    # Strict: otherwise a stray quote is accepted and swallows the rows after it.
    reader = csv.reader(chain(first, rows), delimiter=delimiter, strict=True)
    num_columns = 0
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                count.num_blank += 1
                continue
            if num_columns and len(fields) != num_columns:
                reason = f"{len(fields)} fields, but the first line names {num_columns} columns"
                count.add_broken(path, reader.line_num, reason)
                continue
            # The first row names the columns, so it is not counted.
            count.num_whole += bool(num_columns)
            num_columns = num_columns or len(fields)
    except csv.Error as error:
        raise _broken(path, reader.line_num, f"not valid CSV: {error}") from error


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits"  # https://docs.python.org/3/library/json.html#json.loads


def _broken(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path}, line {number}: {reason}", _NO_START)

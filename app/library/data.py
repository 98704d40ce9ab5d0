"""Find data and validate its form before any node is involved.

The form (encoding, JSON, columns) is checked line by line on this PC. As on the nodes, a few broken
rows are skipped and counted. Data that is mostly broken is refused with its first broken line, and
data that would be trained wrongly is refused by `data_judge`. Files are recognized and split into
rows exactly as by `agents.trainer.data.files`, so that nothing trainable is refused here.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agents.contract.spec import DataSpec
from agents.shared.data.encodings import offer_encoding
from agents.shared.data.files import (
    KINDS,
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
    look_through,
    open_text,
    read_lines,
    read_page,
)
from agents.shared.data.offers import offer_mapping
from agents.shared.data.splits import choose_named
from agents.shared.files.folder_files import ForeignFile, open_regular, require_own
from app.errors import UserError
from app.library.bundles import Source, make_bundle, refused
from app.library.data_judge import RowJudge
from app.library.private_places import HINT, explain_name, explain_private
from app.storage.hashes import HashStore
from app.text import shorten, show_list

QUICK_BYTES = 1 << 20
"""Maximum size of data that is read in full by checks that must be instant, in bytes."""
MOST_BROKEN = 10
MOST_BROKEN_SHARE = 0.05
"""Data with more broken rows than both bounds is refused, as in `agents.trainer.data.tally`."""
_NO_START = "Correct the file; nothing was started."
_ONE_VALUE = "Name the file .json if its rows are one list, or take several lines each."
# Only the beginning of larger `.json` files is parsed here; all of it would take gigabytes of RAM.
_LARGE_JSON_BYTES = 32 << 20
_JUDGED_JSON_CHARS = 4 << 20
# Maximum length of the first line of a `.json` file with a row per line, in characters.
_MOST_LINE_CHARS = 1 << 20
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_BLANK = re.compile(r"\s*")
_GAP = re.compile(r"[ \t\r\n,]*")
_NO_OBJECT = "a row is not an object such as {...}"
# Bytes that are not UTF-8, as `surrogateescape` decodes them.
_FOREIGN_BYTE = re.compile("[\udc80-\udcff]")


def is_hub_data(name: str) -> bool:
    """Return whether a name that is not a file here can be a data set of the hub.

    >>> is_hub_data("org/name"), is_hub_data("data/chats.jsonl"), is_hub_data("chats")
    (True, False, False)
    """
    plain = name.startswith((".", "~", "/")) or Path(name).suffix.lower() in KINDS
    return _HUB_ID.fullmatch(name) is not None and not plain


def explain_missing_data(name: str) -> str:
    """Return why a name cannot be data, without opening it; empty: it can."""
    if private := explain_private(name):
        return f"This {private}."
    try:
        is_here = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, not valid in a path
        is_here = False
    if is_here or is_hub_data(name):
        return ""
    return "There is no such file or folder on this PC."


def require_data(
    name: str, key: str, data: DataSpec | None = None, split: str | None = None
) -> None:
    """Refuse data that no run can read, in milliseconds: large files are not read in full.

    Raises:
        UserError: there is no such file, its kind is not supported, it is empty or broken, or it
            would be trained wrongly.
    """
    files = _list_files(name, key, split)
    try:
        sizes = {path: path.stat().st_size for path in files}
    except OSError as error:
        text = f"{error.filename} ({key}) cannot be read: {error.strerror}"
        raise UserError(text, "Check the path and its permissions.") from error
    if files and sum(sizes.values()) <= QUICK_BYTES:
        check_form(*files, data=data, name=Path(name))
        return
    # An empty file is no problem if another file has rows.
    encoding = data.encoding if data else UTF_8
    check_kinds(*(path for path in files if sizes[path]), encoding=encoding)


def find_data(
    name: str,
    key: str,
    hashes: HashStore,
    data: DataSpec | None = None,
    beyond: Sequence[str] = (),
    *,
    split: str | None = None,
    counts: list[int | None] | None = None,
) -> Source:
    """Validate a data file or folder and return its bundle.

    Nodes download a data set of the hub (`org/name`) themselves.

    Args:
        name: path as in the run file, or a hub id.
        key: key of the run file, `data.train` or `data.eval`, for messages.
        hashes: cached hashes of files.
        data: format and ignored columns of the run; None: accept any readable data.
        beyond: tokens for which the model has no weights.
        split: name of the split of a folder to use alone.
        counts: gets the number of rows; None if only a node can count them.

    Raises:
        UserError: there is no such file, its kind is not supported, it is broken, or it would be
            trained wrongly.
    """
    files = _list_files(name, key, split)
    if not files:
        if counts is not None:
            counts.append(None)
        return Source(value=name)  # on the hub
    path = Path(name).expanduser().absolute()
    num_rows = check_form(*files, data=data, name=path, beyond=beyond)
    if counts is not None:
        counts.append(num_rows)
    if path.is_dir():
        return make_bundle("data", path.name, path, files, hashes)
    file = _follow(path)
    return make_bundle("data", path.stem, file.parent, [file], hashes, member=file.name)


def _list_files(name: str, key: str, split: str | None = None) -> tuple[Path, ...]:
    """Return the files of data on this PC; empty: it is a data set of the hub.

    Raises:
        UserError: it is neither on this PC nor on the hub, or it is private.
    """
    if private := explain_private(name):
        raise UserError(f"{shorten(name)} ({key}) {private}, so it is not sent", HINT)
    if explain_missing_data(name):
        raise UserError(
            f"the data file {shorten(name)} ({key}) does not exist",
            "Give its path relative to the run file, or its absolute path.",
        )
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        files = _list_folder(path)
        return files if split is None else _choose_split(path, files, split)
    if split is not None and path.exists():
        raise UserError(
            f"{name} is one file and has no split {split}",
            "Name a folder with a file of each split, or leave the split out.",
        )
    return () if not path.exists() and is_hub_data(name) else (path,)


def _choose_split(folder: Path, files: Sequence[Path], split: str) -> tuple[Path, ...]:
    chosen = choose_named(folder, files, split)
    if not chosen:
        names = show_list([file.relative_to(folder).as_posix() for file in files[:5]])
        raise UserError(
            f"{folder} has no split {split}; its files are {names}",
            "Name a split that is part of a file's name, or leave it out.",
        )
    return tuple(chosen)


def _follow(path: Path) -> Path:
    """Return the target of a link that the user named, which may lead anywhere, else the path."""
    try:
        require_own(path, path.parent)
        return path
    except ForeignFile:
        target = path.resolve()
    # Nodes recognize the kind of a file by the name of the target, which is sent.
    if target.suffix.lower() == path.suffix.lower():
        return target
    raise UserError(
        f"{path} is a link to {target}, whose name ends otherwise",
        f"Let both end in '{path.suffix}', or name the file itself.",
    )


def _list_folder(folder: Path) -> tuple[Path, ...]:
    try:
        found = look_through(folder)
    except ForeignFile as error:
        raise refused(error) from error
    except OSError as error:
        text = f"{folder} cannot be read: {error.strerror}: {error.filename}"
        raise UserError(text, "Name a folder that holds only the data.") from error
    if found.packed is not None:
        raise UserError(
            f"{found.packed} is compressed and would be left out",
            "Unpack it, or take it out of the folder.",
        )
    for path in found.data:
        if private := explain_name(path):
            raise UserError(f"{path} {private}, so {folder} is not sent", HINT)
    if not found.data:
        raise UserError(
            f"{folder} holds no data file",
            "Use .jsonl, .json, .csv, .tsv, .txt, .md, .html, .parquet or source code.",
        )
    return found.data


def check_kinds(*paths: Path, encoding: str = UTF_8) -> None:
    """Refuse files that are not data, by their names and first bytes.

    Raises:
        UserError: a file is not data; it names the file and the reason.
    """
    for path in paths:
        with _explained(path):
            if find_kind(path, encoding) == "parquet":
                _check_parquet(path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into errors for the user."""
    try:
        yield
    except UnreadableData as error:
        raise UserError(str(error), f"{error.hint}.") from error
    except ForeignFile as error:
        raise refused(error) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "Check the path.") from error


def check_form(
    *paths: Path, data: DataSpec | None = None, name: Path | None = None, beyond: Sequence[str] = ()
) -> int | None:
    """Read data files once and refuse data that cannot be read, or would be trained wrongly.

    Returns the number of whole rows; None if only a node can count them.

    Args:
        paths: the files.
        data: format and ignored columns of the run; None: accept rows of any meaning.
        name: name of all files together, for messages.
        beyond: tokens for which the model has no weights.

    Raises:
        UserError: the data is refused; it names the file, the line and the reason.
    """
    judge = RowJudge(data or DataSpec(train="-"), beyond)
    count = _RowCount(judge)
    is_counted = True
    for path in paths:
        judge.begin(path)
        with _explained(path):
            kind = find_kind(path, judge.encoding)
            is_large = kind == "json" and path.stat().st_size > _LARGE_JSON_BYTES
            is_counted &= kind not in ("parquet", "text") and not is_large
            if kind == "parquet":
                _check_parquet(path)
                count.num_whole += 1
            else:
                _count_rows(path, kind, count)
    count.judge()
    if data is not None:
        judge.refuse(str(name or paths[0]))
    if not count.num_whole:
        is_or_are = "is" if len(paths) == 1 else "and all other data files in its folder are"
        raise UserError(
            f"{paths[0]} {is_or_are} empty", "Give a file with at least one row to learn from."
        )
    return count.num_whole if is_counted else None


def _count_rows(path: Path, kind: str, count: _RowCount) -> None:
    with explaining_bytes(path, count.meant.encoding):
        _count_text_rows(path, kind, count)


def _count_text_rows(path: Path, kind: str, count: _RowCount) -> None:
    encoding = count.meant.encoding
    ends = find_line_end(path, kind)
    with open_text(open_regular(path), encoding, newline=ends) as file:
        lines = read_lines(path, file, ends)
        if kind == "csv":
            _check_table(path, lines, count)
        elif kind in ("text", "html"):
            _check_text(path, lines if kind == "text" else read_page(path, file), count)
        elif kind == "jsonl" or _has_row_per_line(path, encoding):
            _check_json_lines(path, lines, count)
        elif path.stat().st_size > _LARGE_JSON_BYTES:
            _judge_json(file.read(_JUDGED_JSON_CHARS), count)
            count.num_whole += 1  # too large to hold here; the trainer streams it
        else:
            _check_json(path, file.read(), count)


def _check_parquet(path: Path) -> None:
    with open_regular(path) as file:
        starts = file.read(4) == b"PAR1"
        # The magic number also ends the file, so a truncated copy lacks it.
        whole = starts and path.stat().st_size >= 12 and file.seek(-4, 2) and file.read() == b"PAR1"
    if not whole:
        raise UserError(f"{path} is not a complete Parquet file", "Write or copy it again.")


class _RowCount:
    """Counter of rows over all files that keeps the first broken row.

    Args:
        meant: judge of the rows' meaning, which gets every row.
    """

    def __init__(self, meant: RowJudge) -> None:
        self.meant = meant
        self.num_whole = 0
        self.num_blank = 0
        self._num_broken = 0
        self._first: UserError | None = None

    def add_read(self, path: Path, number: int, text: str, row: Any) -> None:
        """Count a row that was parsed from `text`; it is broken if `text` is not UTF-8."""
        if odd := _FOREIGN_BYTE.search(text):
            reason = f"byte 0x{ord(odd[0]) - 0xDC00:02x} is not UTF-8"
            self.add_broken(path, number, reason, "" if self._first else _hint_bytes(path))
            return
        self.num_whole += 1
        self.meant.add(row)

    def add_blank(self) -> None:
        self.num_blank += 1
        self.meant.add(None)

    def add_broken(self, path: Path, number: int, reason: str, hint: str = _NO_START) -> None:
        self._num_broken += 1
        self.meant.add(None)
        self._first = self._first or _broken(path, number, reason, hint)

    def judge(self) -> None:
        """Check that not too many rows are broken.

        Raises:
            UserError: too many rows are broken; it names the first.
        """
        num_rows = self.num_whole + self._num_broken + self.num_blank
        too_many = max(MOST_BROKEN, MOST_BROKEN_SHARE * num_rows)
        # Without any whole row, the first broken row explains more than "the file is empty".
        if self._first and (self._num_broken > too_many or not self.num_whole):
            raise self._first


def _hint_bytes(path: Path) -> str:
    offered = offer_encoding(path)
    also = f", or set {offered}" if offered else ""
    return f"Save the file as UTF-8{also}; nothing was started."


def _check_text(path: Path, lines: Iterable[str | None], count: _RowCount) -> None:
    for number, line in enumerate(lines, start=1):
        if line is None:
            count.add_broken(path, number, LONG_LINE)
        elif line.strip():
            count.add_read(path, number, line, {"text": line})
        else:
            count.meant.add(None)


def _check_json_lines(path: Path, lines: Iterable[str | None], count: _RowCount) -> None:
    for number, line in enumerate(lines, start=1):
        if line is None:
            count.add_broken(path, number, LONG_LINE)
            continue
        if not line.strip():
            count.add_blank()
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            # A lone opening bracket begins one value that spans many lines.
            hint = _ONE_VALUE if line.strip() in ("[", "{") else _NO_START
            count.add_broken(path, number, f"not valid JSON: {explain_bad_json(error)}", hint)
            continue
        if count.meant.takes(row):
            count.add_read(path, number, line, row)
        else:
            is_list = isinstance(row, list) and path.suffix.lower() != ".json"
            count.add_broken(path, number, _NO_OBJECT, _hint_for(row, _ONE_VALUE * is_list))


def _hint_for(row: Any, otherwise: str = "") -> str:
    """Return the advice for a row that is not an object."""
    offer = offer_mapping(row)
    return f"Set {offer}; nothing was started." if offer else otherwise or _NO_START


def _has_row_per_line(path: Path, encoding: str) -> bool:
    """Return whether the first line of a `.json` file is a complete object."""
    line = "\n"
    with open_text(open_regular(path), encoding, newline="\n") as file:
        while line and not line.strip():
            line = file.readline(_MOST_LINE_CHARS)
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _check_json(path: Path, text: str, count: _RowCount) -> None:
    """Check a list of objects, or consecutive objects."""
    decoder = json.JSONDecoder()
    start = _end_of(_BLANK, text, 0)
    if start == len(text):
        return
    if text[start] not in "[{":
        raise UserError(f"{path} holds no list of rows", "Write [{...}, {...}] or use .jsonl.")
    is_list = text[start] == "["
    if is_list:
        count.meant.begin_list()
    line, counted = 1, 0
    place = _end_of(_GAP, text, start + is_list)
    while place < len(text) and not (is_list and text[place] == "]"):
        # Count from the last position only: from the start each time would take quadratic time.
        line, counted = line + text.count("\n", counted, place), place
        began = place
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            number = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _broken(path, number, f"not valid JSON: {explain_bad_json(error)}") from error
        if count.meant.takes(value):
            count.add_read(path, line, text[began:place], value)
        else:
            count.add_broken(path, line, _NO_OBJECT, _hint_for(value))
        place = _end_of(_GAP, text, place)
    if is_list and place == len(text):
        number = 1 + text.count("\n")
        raise _broken(path, number, "not valid JSON: the list has no end")
    if is_list and text[place + 1 :].strip():
        number = 1 + text.count("\n", 0, _end_of(_BLANK, text, place + 1))
        raise _broken(path, number, "not valid JSON: more follows the end of the list")


def _judge_json(text: str, count: _RowCount) -> None:
    """Judge the first objects of a list whose beginning is `text`."""
    decoder = json.JSONDecoder()
    place = _end_of(_BLANK, text, 0)
    if text[place : place + 1] == "[":
        count.meant.begin_list()
        place += 1
    with contextlib.suppress(ValueError, RecursionError):
        while (place := _end_of(_GAP, text, place)) < len(text):
            row, place = decoder.raw_decode(text, place)
            count.meant.add(row)


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _check_table(path: Path, lines: Iterator[str | None], count: _RowCount) -> None:
    # The limit is global to the process; its default of 128 KiB is too short for chats.
    csv.field_size_limit(MAX_LINE_CHARS)
    bounded = TableLines(path, lines)
    # Strict, since otherwise a stray quote swallows the rows after it.
    delimiter = find_delimiter(path, count.meant.encoding)
    reader = csv.reader(iter(bounded), delimiter=delimiter, strict=True)
    names: list[str] = []
    try:
        for fields in reader:
            bounded.begin_row()
            if not any(field.strip() for field in fields):
                count.add_blank()
                continue
            if names and len(fields) != len(names):
                reason = f"{len(fields)} fields, but the first line names {len(names)} columns"
                count.add_broken(path, reader.line_num, reason)
                continue
            # The first row holds the names of the columns and does not count.
            if names:
                row = dict(zip(names, fields, strict=True))
                count.add_read(path, reader.line_num, " ".join(fields), row)
            names = names or [name.strip() for name in fields]
    except csv.Error as error:
        raise _broken(path, reader.line_num, f"not valid CSV: {error}") from error


def _broken(path: Path, number: int, reason: str, hint: str = _NO_START) -> UserError:
    return UserError(f"{path}, line {number}: {reason}", hint)

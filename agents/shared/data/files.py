"""Choose the files that hold rows, and how to split a file into rows.

Shared, so that the master's check and the nodes' reading agree.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

from agents.shared.data.encodings import guess_utf16, offer_encoding
from agents.shared.data.html_text import read_html
from agents.shared.files.folder_files import open_regular, walk_own

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv"}
KINDS |= {".txt": "text", ".text": "text", ".md": "text", ".parquet": "parquet"}
"""Kind of a file by its suffix; it determines how the file is split into rows."""
UTF_8 = "utf-8"
_CODE = (
    ".py .pyi .c .h .cc .cpp .cxx .hpp .java .js .jsx .ts .tsx .go .rs .rb .php .cs .swift .kt"
    " .scala .sh .bash .sql .lua .pl .r .jl .hs .ml .ex .erl .clj .dart .zig .vue .css .tex .rst"
)
OTHERS = {**dict.fromkeys(_CODE.split(), "text"), ".html": "html", ".htm": "html"}
"""The same for source code and web pages, which are documents where a folder has no other data."""
_NAMED = "Use .jsonl, .json, .csv, .tsv, .txt, .md, .html, .parquet or source code"
MAX_PAGE_CHARS = 1 << 25
"""Maximum length of a web page, which is held in memory, in characters."""
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"(\xb5/\xfd": "zstd", b"\xfd7zXZ": "xz"}
_PACKED |= {b"BZh91AY&SY": "bzip2"}
"""First bytes of compressed files."""
_PACKED_SUFFIXES = frozenset({".gz", ".zip", ".zst", ".xz", ".bz2"})
_NOT_DATA = ("dataset_info", "manifest.json", "state.json")

# Prefixes of text files that describe the data instead of holding rows.
_NOTES = ("readme", "license")
_START_BYTES = 4096
_PRIVATE_KEY = re.compile(rb"\s*-----BEGIN [A-Z ]{0,40}PRIVATE KEY|\s*PuTTY-User-Key-File-")
MAX_LINE_CHARS = 1 << 24
"""Maximum length of a line, and of a table's row, in characters. A model reads only the first few
thousand tokens of a row, and a line without an end would fill all memory."""
_MAX_SKIPPED_CHARS = 1 << 28
_SKIPPED_AT_ONCE = 1 << 20
_LINE_END_BYTES = 1 << 20


LONG_LINE = f"the line is longer than {MAX_LINE_CHARS:,} characters"


class UnreadableData(Exception):
    """Raised when a file holds no readable data. Neither message nor hint ends with a full stop."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def codec_of(encoding: str) -> str:
    """Return Python's codec that reads an encoding without its byte order mark."""
    return "utf-8-sig" if encoding == UTF_8 else encoding


def open_text(file: BinaryIO, encoding: str, newline: str) -> TextIO:
    """Return the text of an open file.

    Bytes that are not UTF-8 become lone surrogates: they invalidate their row, not the file. In
    other encodings a character may have any bytes, so a wrong one invalidates all that follows.
    """
    errors = "surrogateescape" if encoding == UTF_8 else "strict"
    return TextIOWrapper(file, encoding=codec_of(encoding), errors=errors, newline=newline)


@contextlib.contextmanager
def explaining_bytes(path: Path, encoding: str) -> Iterator[None]:
    """Raise UnreadableData in place of an error about bytes that are not of the encoding."""
    try:
        yield
    except UnicodeError as error:
        offered = offer_encoding(path)
        raise UnreadableData(
            f"{path} is not text in {encoding}, as data.encoding says: {error}",
            f"Set {offered}" if offered else "Leave data.encoding out: the file is UTF-8",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFiles:
    """Files in and below a folder."""

    data: tuple[Path, ...]
    """Files with rows, in the order of their names."""
    packed: Path | None
    """Compressed file with rows that has no unpacked copy next to it; None: no such file."""


def look_through(folder: Path) -> FolderFiles:
    """Return the files in and below a folder that hold rows, judged by their names.

    Raises:
        ForeignFile: one of them is not an ordinary file, or a link leads out of the folder.
        OSError: a part of it cannot be read.
    """
    files = sorted(walk_own(folder, lambda name: kind_of(name) != "" or _may_be_packed(name)))
    packed = next(filter(_is_packed, files), None)
    return FolderFiles(data=tuple(choose_data(files)), packed=packed)


def choose_data(files: Sequence[Path]) -> list[Path]:
    """Return the files of a folder that hold rows, of all that may, judged by their names.

    >>> [path.name for path in choose_data([Path("a.md"), Path("README.md"), Path("load.py")])]
    ['a.md', 'README.md']
    >>> [path.name for path in choose_data([Path("README.md"), Path("main.py")])]
    ['main.py']
    """
    data = [path for path in files if may_be_data(path.name)]
    # In a folder of Markdown, a README.md is one of its documents, not the card of a data set.
    if data and {path.suffix.lower() for path in data} == {".md"}:
        data = [path for path in files if path.suffix.lower() == ".md"]
    if not data:
        data = [path for path in files if path.suffix.lower() in OTHERS]
    return data


def kind_of(name: str) -> str:
    """Return how a file of a name is split into rows; empty: no kind that Rackless reads.

    >>> kind_of("rows.JSONL"), kind_of("main.py"), kind_of("a.png")
    ('jsonl', 'text', '')
    """
    suffix = Path(name).suffix.lower()
    return KINDS.get(suffix) or OTHERS.get(suffix, "")


def _may_be_packed(name: str) -> bool:
    path = Path(name)
    return path.suffix.lower() in _PACKED_SUFFIXES and may_be_data(path.stem)


def _is_packed(path: Path) -> bool:
    return _may_be_packed(path.name) and not path.with_suffix("").exists()


def may_be_data(name: str) -> bool:
    """Return whether a file of a folder holds rows, judged by its name.

    >>> [may_be_data(name) for name in ("rows.JSONL", "README.md", "readme.csv", "state.json")]
    [True, False, True, False]
    """
    kind = KINDS.get(Path(name).suffix.lower())
    # Notes are text; a table named readme.csv holds rows.
    others = _NOT_DATA + _NOTES if kind == "text" else _NOT_DATA
    return kind is not None and not name.lower().startswith(others)


def find_kind(path: Path, encoding: str = UTF_8) -> str:
    """Return how a file is split into rows: one of the values of `KINDS`.

    A file with another suffix may be JSON, judged by its first bytes.

    Raises:
        UnreadableData: Rackless cannot read files of this kind.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        start = file.read(_START_BYTES)
    suffix = path.suffix.lower()
    kind = KINDS.get(suffix) or OTHERS.get(suffix)
    # First of all: no other message may suggest sending this file.
    if _PRIVATE_KEY.match(start):
        raise UnreadableData(
            f"{path} is a private key, which is never sent", "Name a file of rows instead"
        )
    packed = next((name for mark, name in _PACKED.items() if start.startswith(mark)), None)
    if packed and (kind is not None or suffix in _PACKED_SUFFIXES):
        raise UnreadableData(
            f"{path} is compressed ({packed})", "Unpack it and name the file in it"
        )
    if start.startswith(b"PAR1") and kind != "parquet":
        raise UnreadableData(f"{path} is a Parquet file", "Let its name end in .parquet")
    wide = guess_utf16(start) if encoding == UTF_8 and kind != "parquet" else ""
    if wide:
        raise UnreadableData(
            f"{path} is {wide.upper()}, not text in UTF-8",
            f"Set data.encoding: {wide}, or save it as UTF-8",
        )
    # Some editors on Windows write a byte order mark first.
    text = start.decode(codec_of(encoding), "ignore").lstrip()
    if kind is None and text.startswith(("{", "[")):
        kind = "json"
    if kind is None:
        raise UnreadableData(
            f"{path}: '{path.suffix}' is not a kind of data file that Rackless reads", _NAMED
        )
    return kind


def find_line_end(path: Path, kind: str) -> str:
    r"""Return the line end of a file of a kind, as `open` expects it.

    Python's csv finds line ends itself (""), and in JSON they do not matter. In other kinds only
    \n ends a line, since texts may contain U+2028 and even \r. A file whose first MiB has \r but
    no \n, as from old Macs, is split at any of \n, \r\n and \r ("").

    Raises:
        OSError: it cannot be read.
    """
    if kind in ("csv", "json"):
        return "" if kind == "csv" else "\n"
    with open_regular(path) as file:
        start = file.read(_LINE_END_BYTES)
    return "" if b"\r" in start and b"\n" not in start else "\n"


def read_page(path: Path, file: TextIO) -> list[str]:
    """Return the lines of the text of a web page.

    Raises:
        UnreadableData: it is longer than `MAX_PAGE_CHARS`.
    """
    page = file.read(MAX_PAGE_CHARS + 1)
    if len(page) > MAX_PAGE_CHARS:
        raise UnreadableData(
            f"{path} is longer than {MAX_PAGE_CHARS:,} characters", "Divide it into several pages"
        )
    return read_html(page).splitlines(keepends=True)


def read_lines(path: Path, file: TextIO, ends: str) -> Iterator[str | None]:
    """Yield the lines of a file with their ends, or None for a line that is too long.

    Args:
        path: name of the file, for messages.
        file: file opened with `ends` as its newline.
        ends: result of `find_line_end`.

    Raises:
        UnreadableData: a line is longer than `_MAX_SKIPPED_CHARS`.
    """
    endings = (ends,) if ends else ("\n", "\r")
    number = 0
    while line := file.readline(MAX_LINE_CHARS + 2):  # lines of DOS end with two characters
        number += 1
        if len(line) <= MAX_LINE_CHARS + 1 or line.endswith(endings):
            yield line
            continue
        num_chars = len(line)
        while not line.endswith(endings) and (line := file.readline(_SKIPPED_AT_ONCE)):
            num_chars += len(line)
            if num_chars > _MAX_SKIPPED_CHARS:
                raise UnreadableData(
                    f"{path}, line {number}: the line does not end within "
                    f"{_MAX_SKIPPED_CHARS:,} characters, so its rows cannot be separated",
                    "Write one row per line",
                )
        yield None


def explain_bad_json(error: ValueError | RecursionError) -> str:
    """Return the fault of a text that `json.loads` rejected, without a full stop."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits"  # https://docs.python.org/3/library/json.html#json.loads


def find_delimiter(path: Path, encoding: str = UTF_8) -> str:
    """Return the delimiter of a table, judged by its first line that is not blank.

    Later lines are not considered, since their texts are full of commas.

    Raises:
        OSError: it cannot be read.
    """
    if path.suffix.lower() == ".tsv":
        return "\t"
    with open_text(path.open("rb"), encoding, newline="") as file:
        header = "\n"
        while header and not header.strip():
            header = file.readline(_LINE_END_BYTES)
    return max(",;\t", key=header.count)


class TableLines:
    """Lines of a table for Python's csv, which itself joins lines without a limit.

    Args:
        path: name of the file, for messages.
        lines: lines from `read_lines`.
    """

    def __init__(self, path: Path, lines: Iterator[str | None]) -> None:
        self._path = path
        self._lines = lines
        self._number = 0
        self._num_chars = 0

    def begin_row(self) -> None:
        """Start counting the characters of the next row."""
        self._num_chars = 0

    def __iter__(self) -> Iterator[str]:
        """Yield the lines.

        Raises:
            UnreadableData: a row is too long, usually because a quote is not closed.
        """
        for line in self._lines:
            self._number += 1
            self._num_chars += MAX_LINE_CHARS + 1 if line is None else len(line)
            if line is None or self._num_chars > MAX_LINE_CHARS:
                raise UnreadableData(
                    f"{self._path}, line {self._number}: a row of the table is longer than "
                    f"{MAX_LINE_CHARS:,} characters",
                    "Correct it: a quote may lack its end. The rows after it cannot be separated",
                )
            yield line

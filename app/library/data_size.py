"""Guess the size of data from its first rows.

A preview or a run tokenizes all of it and gives exact figures. Until then a plan uses this guess
and says so. English has about 4 characters per token in common vocabularies; code and other
languages have fewer, so a guess may be half of the real number.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.contract.data import DataFinding
from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import DataSpec, Documents, RunSpec
from agents.shared.data.files import MAX_LINE_CHARS, OTHERS, choose_data, codec_of, kind_of
from agents.shared.data.findings import describe_cut, sort_findings
from agents.shared.data.reshape import unfold
from agents.shared.files.folder_files import is_own, open_regular
from app.library.data_judge import RowJudge
from app.library.private_places import explain_private

SAMPLE_BYTES = 1 << 20
"""Maximum number of bytes that are read of the first file, for the guess."""
JUDGED_BYTES = 64 << 10
"""Maximum number of bytes that are read of each other file of a folder, for findings."""
MAX_JUDGED_FILES = 8
MAX_ENTRIES = 500
"""Maximum number of entries of a data folder and its subfolders."""
CHARS_PER_TOKEN = 4.0
"""Mean number of characters per token in English."""
# Typical number of tokens that a chat template adds around each turn.
_TURN_TOKENS = 6
# Maximum length of a CSV field, in characters; the default of 128 KiB is too short for chats.
_MAX_CSV_FIELD = MAX_LINE_CHARS


@dataclass(frozen=True, kw_only=True, slots=True)
class DataGuess:
    """Size of data, extrapolated from its first rows."""

    num_rows: int | None
    """Number of rows; None: unknown without reading the whole file."""
    mean_tokens: float | None
    longest_tokens: int | None
    """Length of the longest row that was read, in tokens."""
    is_whole: bool
    """True if all rows were read."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each row that was read."""
    findings: tuple[DataFinding, ...] = ()
    """Findings about these rows."""
    is_text: bool = False
    """True if rows are plain texts, which are divided or joined as `data.long_text` says."""


NOTHING = DataGuess(num_rows=None, mean_tokens=None, longest_tokens=None, is_whole=False)


def guess_data(path: Path, data: DataSpec | None = None) -> DataGuess:
    """Guess from the beginning of a file, or of a folder's files. Never raises.

    Args:
        path: file or folder.
        data: format and ignored columns of the run; None: any format.
    """
    data = data or DataSpec(train="-")
    judge = RowJudge(data)
    try:
        files = [file for file in list_files(path) or () if file.is_file()]
        first = _guess_file(files[0], judge, data.documents) if files else NOTHING
        for file in files[1:MAX_JUDGED_FILES]:
            _judge_file(file, judge)
        first = replace(first, findings=judge.find(), is_text=judge.is_text)
        if not files or first.num_rows is None:
            return first
        size_bytes, all_bytes = files[0].stat().st_size, sum(f.stat().st_size for f in files)
    except (OSError, ValueError, csv.Error):
        return NOTHING
    if len(files) == 1:
        return first
    # Other files are assumed to have rows like those of the first one.
    return DataGuess(
        num_rows=round((first.num_rows or 0) * all_bytes / max(1, size_bytes)),
        mean_tokens=first.mean_tokens,
        longest_tokens=first.longest_tokens,
        is_whole=False,
        lengths=first.lengths,
        findings=first.findings,
        is_text=first.is_text,
    )


def guess_sources(data: DataSpec) -> DataGuess:
    """Guess an epoch of all sources: limited, without held-out rows, and weighted. Never raises."""
    sources = data.list_sources()
    paths = [Path(os.path.expanduser(source.path)) for source in sources]
    guesses = [
        guess_data(path, data.for_source(source))
        for path, source in zip(paths, sources, strict=True)
    ]
    if len(sources) > 1:
        guesses = [
            replace(guess, findings=tuple(replace(f, source=source.name) for f in guess.findings))
            for guess, source in zip(guesses, sources, strict=True)
        ]
    findings = sort_findings(finding for guess in guesses for finding in guess.findings)
    known = [(guess.num_rows or 0, guess.mean_tokens or 0.0) for guess in guesses]
    if any(guess.num_rows is None or guess.mean_tokens is None for guess in guesses):
        return replace(NOTHING, findings=findings)
    used = [
        min(count, source.max_rows or count)
        for (count, _), source in zip(known, sources, strict=True)
    ]
    num_used = sum(used)
    held_out = data.held_out.count(num_used) if data.held_out is not None else 0
    kept = 1 - held_out / max(1, num_used)
    rows = [count * kept * source.weight for count, source in zip(used, sources, strict=True)]
    num_tokens = sum(count * mean for count, (_, mean) in zip(rows, known, strict=True))
    return DataGuess(
        num_rows=max(1, round(sum(rows))),
        mean_tokens=num_tokens / max(1e-9, sum(rows)),
        longest_tokens=max(guess.longest_tokens or 0 for guess in guesses) or None,
        is_whole=all(guess.is_whole for guess in guesses),
        lengths=tuple(length for guess in guesses for length in guess.lengths),
        findings=findings,
        is_text=all(guess.is_text for guess in guesses),
    )


def cut_and_pack(guess: DataGuess, spec: RunSpec) -> DataGuess:
    """Return the guess for the run's examples: truncated, and packed if the run packs.

    >>> from agents.contract.spec import DataSpec
    >>> spec = RunSpec(model="m", data=DataSpec(train="t"), sequence_tokens=1000, packing=True)
    >>> guess = DataGuess(num_rows=100, mean_tokens=200.0, longest_tokens=500, is_whole=True)
    >>> packed = cut_and_pack(guess, spec)
    >>> packed.num_rows, packed.mean_tokens
    (20, 1000.0)
    """
    if guess.mean_tokens is None or guess.num_rows is None:
        return guess
    joins = spec.data.long_text == "join"
    if guess.is_text and spec.data.long_text in ("split", "join"):
        guess = _divide(guess, guess.num_rows, spec.sequence_tokens, joins=joins)
    num_rows, mean = guess.num_rows or 1, guess.mean_tokens or 1.0
    # A preference pair has two answers, each of which may have up to the limit.
    most = spec.sequence_tokens * OBJECTIVES[spec.objective].num_segments
    mean = min(mean, float(most))
    findings = guess.findings
    if guess.lengths:
        kept, total = sum(min(one, most) for one in guess.lengths), sum(guess.lengths)
        mean = kept / len(guess.lengths)
        findings = sort_findings((*findings, *describe_cut(total, total - kept)))
    longest = min(guess.longest_tokens or most, most)
    if spec.packing:
        num_packs = max(1, -(-int(num_rows * mean) // most))
        mean, longest, num_rows = num_rows * mean / num_packs, most, num_packs
    return replace(
        guess, num_rows=num_rows, mean_tokens=mean, longest_tokens=longest, findings=findings
    )


def _divide(guess: DataGuess, num_rows: int, most: int, *, joins: bool) -> DataGuess:
    """Return the guess for texts that are divided, or joined into full sequences.

    >>> guess = DataGuess(
    ...     num_rows=2, mean_tokens=1050.0, longest_tokens=2000, is_whole=True, lengths=(2000, 100)
    ... )
    >>> found = _divide(guess, 2, 500, joins=False)
    >>> found.num_rows, found.mean_tokens, found.longest_tokens
    (5, 420.0, 500)
    """
    lengths = guess.lengths or (round(guess.mean_tokens or 1),)
    total = sum(lengths)
    pieces = [
        min(most, left)
        for one in (lengths if not joins else (total,))
        for left in range(one, 0, -most)
    ] or [1]
    scale = num_rows / len(lengths)
    return replace(
        guess,
        num_rows=max(1, round(len(pieces) * scale)),
        mean_tokens=total / len(pieces),
        longest_tokens=max(pieces),
        lengths=tuple(pieces),
    )


def list_files(path: Path) -> list[Path] | None:
    """Return a file, or the data files of a folder; None: the folder has too many entries.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    folders, num_seen = [path], 0
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                num_seen += 1
                if num_seen > MAX_ENTRIES:
                    return None  # such as `/` or `/home`, while the user types a longer path
                if entry.name.startswith("."):
                    continue
                # A link to a folder above would make the walk endless.
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                # A link out of the folder is left out here; the start refuses it.
                elif kind_of(entry.name) and is_own(Path(entry.path), path):
                    found.append(Path(entry.path))
    return choose_data(sorted(found))


def _guess_file(path: Path, judge: RowJudge, documents: Documents) -> DataGuess:
    size_bytes = path.stat().st_size
    data = _read_start(path, SAMPLE_BYTES)
    is_whole = len(data) == size_bytes
    counts = [count for count in map(_count, _judged(path, data, judge)) if count]
    if documents != "line" and kind_of(path.name) in ("text", "html") and counts:
        text = data.decode(codec_of(judge.encoding), "replace")
        # The whole file, of which the sample is the beginning; paragraphs are like the first ones.
        parts = [text] if documents == "file" else re.split(r"\n\s*\n", text)
        counts = [_count({"text": part}) for part in parts if part.strip()]
        if documents == "file":
            counts = [round(counts[0] * size_bytes / len(data))]
            is_whole = True
    if not counts:
        return NOTHING
    num_read = len(data)
    left_out = min(size_bytes, SAMPLE_BYTES) - num_read
    if left_out > num_read:
        # One row takes most of the sample, so it has at least these tokens.
        counts.append(round(left_out / CHARS_PER_TOKEN))
        num_read += left_out
    num_rows = len(counts) if is_whole else round(len(counts) * size_bytes / num_read)
    return DataGuess(
        num_rows=num_rows,
        mean_tokens=sum(counts) / len(counts),
        longest_tokens=max(counts),
        is_whole=is_whole,
        lengths=tuple(counts),
    )


def _read_start(path: Path, num_bytes: int) -> bytes:
    """Return the beginning of a file without its incomplete last row."""
    if path.suffix.lower() not in _READERS or explain_private(str(path)):
        return b""
    with open_regular(path) as file:
        data = file.read(num_bytes)
    if len(data) == path.stat().st_size or path.suffix.lower() == ".json":
        return data
    # An incomplete row would be counted with too few tokens, or as broken.
    return data[: data.rfind(b"\n") + 1]


def _judge_file(path: Path, judge: RowJudge) -> None:
    for _ in _judged(path, _read_start(path, JUDGED_BYTES), judge):
        pass


def _judged(path: Path, data: bytes, judge: RowJudge) -> Iterator[Any]:
    """Judge and yield the rows at the beginning of a file."""
    read = _READERS.get(path.suffix.lower())
    judge.begin(path, may_wrap=False)  # the readers unwrap by themselves
    for row in read(data.decode(codec_of(judge.encoding), "replace")) if read is not None else ():
        judge.add(row)
        yield row


def _read_json_lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None  # broken rows are skipped, as in training


def _read_json(text: str) -> Iterator[Any]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        yield from _read_objects(text)  # truncated by the sample, or one object per line
        return
    if isinstance(rows, dict):
        yield from (row for _, row in unfold(iter([(1, rows)])))
    else:
        yield from rows if isinstance(rows, list) else [rows]


def _read_objects(text: str) -> Iterator[Any]:
    """Yield the objects of a list whose beginning is `text`, or consecutive objects."""
    decoder = json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            row, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            # With a row per line, a broken row costs only its line.
            place = text.find("\n", place)
            row = None
        yield row
        place = text.find("{", place) if place >= 0 else place


def _read_csv(text: str) -> Iterator[Any]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    header = next((line for line in text.splitlines() if line.strip()), "")
    rows = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=header.count))
    names = next((row for row in rows if any(field.strip() for field in row)), [])
    for row in rows:
        yield dict(zip(names, row, strict=False))


def _read_text(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        yield {"text": line} if line.strip() else None


def _count(row: Any) -> int:
    """Return the estimated tokens of all texts of a row, at any depth."""
    texts, left = [], [row]
    while left:
        part = left.pop()
        if isinstance(part, str):
            texts.append(len(part))
        elif isinstance(part, dict):
            # Roles are part of the chat template, which _TURN_TOKENS covers.
            left += [v for k, v in part.items() if k not in ("role", "from", "id")]
        elif isinstance(part, list):
            left += part
    return round(sum(texts) / CHARS_PER_TOKEN) + _TURN_TOKENS * len(texts) if texts else 0


_READERS = {
    ".jsonl": _read_json_lines, ".ndjson": _read_json_lines, ".json": _read_json,
    ".csv": _read_csv, ".tsv": _read_csv, ".txt": _read_text, ".text": _read_text,
    ".md": _read_text, **dict.fromkeys(OTHERS, _read_text),
}  # fmt: skip

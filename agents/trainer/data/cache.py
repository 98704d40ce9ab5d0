"""Tokenized data by content: made once per node, found again by every rank and every later run.

The name of an entry is the hash of all that decides it: the bytes of the data, the tokenizer with
its chat template, the settings, and this package's own source. One process per node writes, under a
lock; the others wait for it and map the same files. Entries not used for longest make room.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agents.contract.spec import RunSpec
from agents.errors import explain_os_error
from agents.state import take_lock
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.rows import DataFiles, RowReader
from agents.trainer.data.store import ExampleSet, open_examples, write_about, write_examples
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokens import Tokenized, tokenize_rows

MAX_BYTES = 50 << 30
"""Above this size, entries that were not used for longest are deleted."""
ReportProgress = Callable[[int, float], None]
"""Called with the rows read so far, and the share of the data that they are."""
_REPORT_ROWS = 1000
_REPORT_CHARS = 1 << 22
_WAIT_S = 1.0
_SOURCES = ("conversations", "examples", "files", "packing", "rows", "store", "tally", "tokens")
_SHARED_SOURCES = ("data_files",)
"""Modules, here and in `agents.contract`, that decide what the rows are and what they teach."""


def load_examples(
    files: DataFiles,
    data_sha256: str,
    spec: RunSpec,
    tokenizer: Any,
    cache: Path,
    report: ReportProgress | None = None,
    wait: Callable[[], None] = lambda: None,
) -> ExampleSet:
    """Return the examples of the data, tokenized now or by an earlier run.

    Args:
        files: the data.
        data_sha256: hash of its content.
        spec: names format, objective, length and packing.
        tokenizer: of the model, with its chat template.
        cache: folder of all entries; it is created.
        tell: hears how far tokenizing is, every thousand rows or few million characters.
        wait: called each second while another process tokenizes the same.

    Raises:
        ExpectedError: the data is of no use; see `rows` and `tally`.
    """
    key = make_key(files, data_sha256, spec, tokenizer)
    with _lock(cache, key, wait):
        examples = open_examples(cache / key)
        if examples is None:
            _write(files, spec, tokenizer, cache / key, report)
            examples = ExampleSet(cache / key)
            prune(cache, MAX_BYTES, keep=key)
    return examples


def make_key(files: DataFiles, data_sha256: str, spec: RunSpec, tokenizer: Any) -> str:
    """Return the name of the entry: a hash of all that decides its content.

    So do the ends of the files' names: the same bytes are other rows as `.txt` than as `.jsonl`.
    Of several files the entry tells the names of those with rows that were left out.
    """
    names = [path.suffix.lower() if len(files.paths) == 1 else path.name for path in files.paths]
    ours = [pkgutil.get_data("agents.trainer.data", f"{name}.py") or b"" for name in _SOURCES]
    ours += [pkgutil.get_data("agents.contract", f"{name}.py") or b"" for name in _SHARED_SOURCES]
    parts = {
        "data": [data_sha256, names],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "words": [tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token],
        "settings": [spec.data.format, spec.objective, spec.sequence_tokens, spec.packing],
        "code": hashlib.sha256(b"\0".join(ours)).hexdigest(),
        "versions": [version("tokenizers"), version("transformers")],
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


@contextmanager
def _lock(cache: Path, key: str, wait: Callable[[], None]) -> Iterator[None]:
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(cache / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise explain_os_error(error, f"writing tokens to {cache}") from error
    try:
        while not take_lock(file, _WAIT_S):
            wait()
        yield
    finally:
        os.close(file)


def _write(
    files: DataFiles, spec: RunSpec, tokenizer: Any, entry: Path, report: ReportProgress | None
) -> None:
    unfinished = entry.with_suffix(".unfinished")
    for folder in (entry, unfinished):  # of a process that was killed, or a damaged disk
        shutil.rmtree(folder, ignore_errors=True)
    tally = Tally(name=files.name)
    reader = RowReader(files, spec.data.format, spec.objective, tally)
    rows = _tokenize(_reporting(reader, tally, report), reader, tokenizer, spec.sequence_tokens)
    capacity = spec.sequence_tokens if spec.packing else None
    try:
        sizes = write_examples(unfinished, rows, capacity=capacity)
        tally.check_usable(sizes["rows"])
        write_about(unfinished, sizes, reader.format, tally)
        unfinished.rename(entry)
    except OSError as error:
        raise explain_os_error(error, f"writing tokens to {entry}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _reporting(
    reader: RowReader, tally: Tally, report: ReportProgress | None
) -> Iterator[ConversationRow]:
    reported, num_chars = 0, 0
    for row in reader:
        num_chars += row.num_chars
        many = tally.num_rows - reported >= _REPORT_ROWS or num_chars >= _REPORT_CHARS
        if report is not None and many:
            reported, num_chars = tally.num_rows, 0
            report(reported, reader.share)
        yield row


def _tokenize(
    rows: Iterator[ConversationRow], reader: RowReader, tokenizer: Any, max_tokens: int
) -> Iterator[Tokenized]:
    for row in tokenize_rows(tokenizer, rows, max_tokens):
        if isinstance(row, Skipped):
            reader.skip(row)
            continue
        if row.cut_from is not None:
            reader.truncate(row.segments[0].row, row.cut_from)
        yield row


def prune(cache: Path, max_bytes: int, *, keep: str) -> None:
    """Delete entries that were not used for longest until `max_bytes` are left, never `keep`.

    Ranks that have an entry mapped keep what they see.
    """
    entries = []
    for about in cache.glob("*/about.json"):
        try:
            size = sum(file.stat().st_size for file in about.parent.iterdir())
            entries.append((about.stat().st_mtime_ns, size, about.parent))
        except OSError:
            continue  # another process deletes it
    total = sum(size for _, size, _ in entries)
    for _, size, folder in sorted(entries):
        if total <= max_bytes:
            return
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size

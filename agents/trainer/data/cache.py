"""Content-addressed cache of tokenized data: written once per node, shared by ranks and later runs.

An entry's name hashes everything that determines its content: the bytes of the data, the tokenizer
with its chat template, the settings, and the source of this package. One process per node writes
under a lock; the others wait and map the same files. Least recently used entries are deleted to
stay within a size limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import DataSpec, RunSpec
from agents.errors import ExpectedError, explain_os_error
from agents.shared.data.findings import refusals
from agents.state import take_lock
from agents.trainer.data.answers import ENDLESS
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.rows import DataFiles, RefusedData, RowReader
from agents.trainer.data.store import ExampleSet, open_examples, write_about, write_examples
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokens import TEXT_RULES, Tokenized, tokenize_rows

MAX_BYTES = 50 << 30
"""Maximum size of the cache, in bytes; least recently used entries are deleted above it."""
ReportProgress = Callable[[int, float], None]
"""Called with the number of rows read so far and their fraction of the data, 0 to 1."""
_REPORT_ROWS = 1000
_REPORT_CHARS = 1 << 22
_WAIT_S = 1.0
# Modules, here and in `agents.shared.data`, whose source determines the content of an entry.
ROW_MODULES = (
    "answers",
    "conversations",
    "examples",
    "files",
    "frames",
    "packing",
    "parquet_reader",
    "rows",
    "stops",
    "store",
    "tally",
    "templates",
    "turns/thoughts",
    "tokens",
    "turns/tool_calls",
    "turns/tool_turns",
)
_SHARED_MODULES = (
    *("columns", "encodings", "files", "findings", "html_text", "meaning", "offers"),
    *("rankings", "rendered", "reshape"),
)


def load_examples(  # noqa: PLR0913 - the parts of an entry's name
    files: DataFiles,
    data_sha256: str,
    spec: RunSpec,
    tokenizer: Any,
    cache: Path,
    report: ReportProgress | None = None,
    wait: Callable[[], None] = lambda: None,
    rules: int = TEXT_RULES,
    chosen: npt.NDArray[np.int64] | None = None,
) -> ExampleSet:
    """Return the examples of the data, tokenized now or by an earlier run.

    Args:
        files: data files.
        data_sha256: hash of their content.
        spec: run spec with format, objective, length and packing.
        tokenizer: the model's tokenizer, with its chat template.
        cache: folder of all entries; created if missing.
        report: called with the progress, every thousand rows or few million characters.
        wait: called each second while another process tokenizes the same data.
        rules: version of `tokens.TEXT_RULES` at the start of the run. Only the newest version
            rejects data that would be trained wrongly, so started runs can continue.
        chosen: numbers of the rows to use, in ascending order; None: all.

    Raises:
        ExpectedError: the data is unusable; see `rows` and `tally`.
    """
    key = make_key(files, data_sha256, spec, tokenizer, rules, chosen)
    weighs_tokens = OBJECTIVES[spec.objective].weighs_tokens
    # One lock per entry: another run may tokenize other data at the same time.
    with lock_entry(cache, key, wait):
        examples = open_examples(cache / key, weighs_tokens=weighs_tokens)
        if examples is None:
            _write(files, spec, tokenizer, cache / key, report, rules, chosen)
            examples = ExampleSet(cache / key, weighs_tokens=weighs_tokens)
            prune(cache, MAX_BYTES, keep=key)
    return examples


def make_key(
    files: DataFiles,
    data_sha256: str,
    spec: RunSpec,
    tokenizer: Any,
    rules: int = TEXT_RULES,
    chosen: npt.NDArray[np.int64] | None = None,
) -> str:
    """Return the entry's name: a hash of everything that determines its content."""
    parts = {
        "data": [data_sha256, list_names(files)],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "words": [tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token],
        "settings": [spec.data.format, spec.objective, spec.sequence_tokens, spec.packing],
        "ignored": sorted(spec.data.ignore_columns),
        "columns": sorted(spec.data.columns),
        "texts": [*(spec.data.documents, spec.data.long_text, spec.data.rendered, spec.data.learn)],
        "reasoning": spec.data.reasoning,
        "encoding": spec.data.encoding,
        "rules": rules,
        "rows": None if chosen is None else hashlib.sha256(chosen.tobytes()).hexdigest(),
        "shuffles": spec.data.shuffle,
        "code": hash_code(ROW_MODULES),
        "versions": [version("tokenizers"), version("transformers")],
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def list_names(files: DataFiles) -> list[str]:
    """Return the parts of file names that determine how files are read."""
    # The same bytes are different rows as `.txt` and as `.jsonl`. With several files the whole
    # names count, since the entry names the files of skipped rows.
    return [path.suffix.lower() if len(files.paths) == 1 else path.name for path in files.paths]


def hash_code(modules: Sequence[str]) -> str:
    """Return a hash of the source of these modules, and of those that read rows on both sides."""
    sources = [pkgutil.get_data("agents.trainer.data", f"{name}.py") or b"" for name in modules]
    shared = [pkgutil.get_data("agents.shared.data", f"{name}.py") for name in _SHARED_MODULES]
    return hashlib.sha256(b"\0".join([*sources, *(one or b"" for one in shared)])).hexdigest()


@contextmanager
def lock_entry(cache: Path, key: str, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of an entry, which one process writes while the others wait."""
    try:
        # Tokens are the user's data: only this account may read them.
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
    files: DataFiles,
    spec: RunSpec,
    tokenizer: Any,
    entry: Path,
    report: ReportProgress | None,
    rules: int,
    chosen: npt.NDArray[np.int64] | None,
) -> None:
    unfinished = entry.with_suffix(".unfinished")
    for folder in (entry, unfinished):  # left by a killed process or a damaged disk
        shutil.rmtree(folder, ignore_errors=True)
    tally = Tally(name=files.name)
    # Started runs continue with the rows that their rules found good enough.
    enforce = rules == TEXT_RULES
    reader = RowReader(files, spec.data, spec.objective, tally, rules=rules, enforce=enforce)
    # Rows stream from the files to the arrays, so memory does not grow with the data.
    reporting = report_rows(reader, tally, report)
    if chosen is not None:
        reporting = pick_rows(reporting, chosen)
    length = spec.sequence_tokens
    rows = tokenize_kept(reporting, reader, tally, tokenizer, length, spec.data, rules)
    capacity = spec.sequence_tokens if spec.packing else None
    try:
        sizes = write_examples(unfinished, rows, capacity=capacity, shuffles=spec.data.shuffle)
        if enforce and refusals(reader.findings):  # such as tools without a place in the template
            raise RefusedData(files.name, reader.findings)
        tally.check_usable(sizes["rows"])
        write_about(unfinished, sizes, reader.format, tally, reader.findings)
        unfinished.rename(entry)
    except OSError as error:
        raise explain_os_error(error, f"writing tokens to {entry}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def report_rows(
    reader: RowReader, tally: Tally, report: ReportProgress | None
) -> Iterator[ConversationRow]:
    """Yield the rows of a reader, and report the progress."""
    reported, num_chars = 0, 0
    for row in reader:
        num_chars += row.num_chars
        many = tally.num_rows - reported >= _REPORT_ROWS or num_chars >= _REPORT_CHARS
        if report is not None and many:
            reported, num_chars = tally.num_rows, 0
            report(reported, reader.share)
        yield row


def pick_rows(
    rows: Iterator[ConversationRow], chosen: npt.NDArray[np.int64]
) -> Iterator[ConversationRow]:
    """Yield the rows with these numbers; both are in ascending order."""
    place, num_chosen = 0, len(chosen)
    for row in rows:
        while place < num_chosen and chosen[place] < row.number:
            place += 1
        if place < num_chosen and chosen[place] == row.number:
            yield row


def tokenize_kept(
    rows: Iterator[ConversationRow],
    reader: RowReader,
    tally: Tally,
    tokenizer: Any,
    max_tokens: int,
    data: DataSpec,
    rules: int = TEXT_RULES,
) -> Iterator[Tokenized]:
    """Yield the tokenized rows; count skipped and truncated ones in the reader's tally.

    Raises:
        ExpectedError: neither the chat template nor the tokenizer has a token that ends an answer.
    """
    for row in tokenize_rows(tokenizer, rows, max_tokens, rules, data.long_text, data.learn):
        if isinstance(row, Skipped):
            reader.skip(row)
            if row.num_tokens:
                reader.count_tokens(row.row, row.num_tokens, row.num_tokens)
            continue
        if any(kind == ENDLESS for kind, _ in row.notes):
            raise ExpectedError(
                "This model cannot learn to stop: its chat template writes no token behind an "
                "answer, and its tokenizer has no end token.",
                "Name its end token as eos_token in tokenizer_config.json of a copy of the model",
            )
        tally.num_rendered += 1
        tally.notes.update(row.notes)
        number = row.segments[0].row
        kept = sum(len(segment.ids) for segment in row.segments)
        reader.count_tokens(number, row.num_tokens, row.num_tokens - kept)
        tally.template_keys.update(row.extra)
        tally.dropped.update(row.dropped)
        if row.cut_from is not None:
            reader.truncate(number, row.cut_from)
        yield row


def prune(cache: Path, max_bytes: int, *, keep: str) -> None:
    """Delete least recently used entries until at most `max_bytes` remain; never `keep`."""
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
            # Ranks that have mapped a deleted entry can still read it.
            shutil.rmtree(folder, ignore_errors=True)
            total -= size

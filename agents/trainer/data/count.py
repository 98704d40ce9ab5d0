"""Count the rows that a run would leave out or cut, before it starts: nothing is kept or shown.

The program of `preview` does it for a job with `count_s`. Without a tokenizer, rows are only read:
malformed ones and ones with nothing to learn are found, and cut tokens are estimated from below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agents.contract.data import DataFinding, DataPreview, NamedRow
from agents.contract.objectives import OBJECTIVES
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.shared.data.findings import describe_cut, sort_findings
from agents.trainer.data.cache import tokenize_kept
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.hub import find_data, find_tokenizer
from agents.trainer.data.rows import DataFiles, RowReader
from agents.trainer.data.tally import Skipped, Tally

MOST_CHARS_PER_TOKEN = 6.0
"""Mean number of characters per token that no common vocabulary exceeds for a text."""
_REPORT_INTERVAL_S = 1.0
_CHECKED_ROWS = 64

Report = Callable[[str], None]


def count_rows(
    spec: RunSpec,
    files: DataFiles,
    *,
    limit_s: float,
    tokenizer: Any = None,
    plain_template: bool = False,
    report: Report = lambda text: None,
) -> DataPreview:
    """Return the numbers of rows without any row; `whole` is False if the time did not suffice.

    Args:
        spec: run spec.
        files: data files.
        limit_s: time after which no further row is read, in seconds.
        tokenizer: the model's tokenizer; None: rows are only read.
        plain_template: True if the tokenizer lacks a chat template.
        report: callback with the progress.

    Raises:
        ExpectedError: the data cannot be read, or no row or too few of them are usable.
    """
    tally = Tally(name=files.name)
    reader = RowReader(files, spec.data, spec.objective, tally)
    timed = _Timed(reader, tally, limit_s, report)
    lengths = _Lengths(spec)
    num_kept = num_tokens = num_targets = longest = 0
    if tokenizer is None:
        for row in timed:
            lengths.add(row)
            num_kept += 1
    else:
        rows = iter(timed)
        length = spec.sequence_tokens
        for kept in tokenize_kept(rows, reader, tally, tokenizer, length, spec.data):
            size = sum(len(segment.ids) for segment in kept.segments)
            num_kept += 1
            num_tokens += size
            num_targets += sum(segment.num_targets for segment in kept.segments)
            longest = max(longest, size)
    if timed.is_whole:
        tally.check_usable(num_kept)
    return DataPreview(
        format=reader.format,
        whole=timed.is_whole,
        num_rows=tally.num_rows,
        num_examples=num_kept,
        num_tokens=num_tokens,
        num_targets=num_targets,
        longest_tokens=longest,
        sequence_tokens=spec.sequence_tokens,
        num_skipped=tally.num_skipped,
        num_malformed=tally.num_malformed,
        num_blank=tally.num_blank,
        num_truncated=tally.num_truncated or lengths.num_cut_rows,
        skipped=name_rows(tally.named),
        truncated=name_rows(tally.truncated),
        plain_template=plain_template,
        findings=sort_findings((*reader.findings, *lengths.find())),
        is_tokenized=tokenizer is not None,
    )


def name_rows(rows: list[Skipped] | tuple[Skipped, ...]) -> tuple[NamedRow, ...]:
    """Return rows with a problem, as they are shown."""
    return tuple(
        NamedRow(row=row.row, reason=row.reason, file=row.file, malformed=row.malformed)
        for row in rows
    )


class _Timed:
    """Iterates over the rows of a reader until the time is up."""

    def __init__(self, reader: RowReader, tally: Tally, limit_s: float, report: Report) -> None:
        self._reader, self._tally, self._report = reader, tally, report
        self._limit_s = limit_s
        self.is_whole = False

    def __iter__(self) -> Iterator[ConversationRow]:
        began_s = reported_s = time.monotonic()
        for number, row in enumerate(self._reader):
            yield row
            if number % _CHECKED_ROWS:
                continue
            now_s = time.monotonic()
            if now_s - began_s > self._limit_s:
                return
            if now_s - reported_s >= _REPORT_INTERVAL_S:
                reported_s = now_s
                share = self._reader.share
                self._report(f"{self._tally.num_rows:,} rows counted, {share:.0%} of the data")
        self.is_whole = True


class _Lengths:
    """The least number of tokens that rows can have, by their characters."""

    def __init__(self, spec: RunSpec) -> None:
        self._most = spec.sequence_tokens * OBJECTIVES[spec.objective].num_segments
        self._divides = spec.data.long_text != "cut"
        self._total = self._cut = 0.0
        self.num_cut_rows = 0

    def add(self, row: ConversationRow) -> None:
        least = row.num_chars / MOST_CHARS_PER_TOKEN
        self._total += least
        if least > self._most and not (self._divides and row.text and not row.learned):
            self._cut += least - self._most
            self.num_cut_rows += 1

    def find(self) -> tuple[DataFinding, ...]:
        return describe_cut(round(self._total), round(self._cut))


def count(job: PreviewJob, report: Report = lambda text: None) -> DataPreview:
    """Return the count that a job requests; without the path of a model, rows are only read.

    Raises:
        ExpectedError: the tokenizer or the data is unusable.
    """
    tokenizer, plain = None, False
    if job.model_path:
        from agents.trainer.data.tokenizer import load_tokenizer  # takes seconds

        # The check of the model reports a tokenizer that is broken; rows can be read without it.
        with suppress(ExpectedError):
            tokenizer, plain = load_tokenizer(find_tokenizer(job.model_path), data=job.spec.data)
    is_train = job.held_out_from is None
    source = job.spec.data.list_sources()[0]
    data = job.spec.data.for_source(source) if is_train else job.spec.data
    split = source.split if is_train else None
    return count_rows(
        replace(job.spec, data=data),
        find_data(job.train_path, held_out_from=job.held_out_from, split=split),
        limit_s=job.count_s or 0.0,
        tokenizer=tokenizer,
        plain_template=plain,
        report=report,
    )

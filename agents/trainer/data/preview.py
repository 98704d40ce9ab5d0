"""Preview the training data of a run: the detected format, sizes, and three rendered rows.

The agent starts this program before a run: `agents.program agents.trainer.data.preview JOB.json
REPORT.json`. It prints JSON lines of kind `progress`, and one of kind `failed` on an error. Rows
are tokenized into the cache that the run uses, so the time is not lost. A run's first rank writes
the same report into its journal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from agents.contract.data import (
    DataFinding,
    DataPreview,
    NamedRow,
    ShownConversation,
    ShownPart,
    ShownRow,
    SourceShare,
)
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import RunSpec
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.file_hashes import hash_files
from agents.shared.data.findings import sort_findings
from agents.shared.models.config_findings import text_of
from agents.state import read_json
from agents.trainer.data.cache import tokenize_kept
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.count import count, name_rows
from agents.trainer.data.examples import Segment
from agents.trainer.data.hub import find_data, find_tokenizer
from agents.trainer.data.names import named_as_given, names_of
from agents.trainer.data.order import order_rows
from agents.trainer.data.parquet_reader import limit_memory
from agents.trainer.data.rows import DataFiles, RefusedData, RowReader
from agents.trainer.data.sources import DataLoader, DataSource, find_sources
from agents.trainer.data.store import ExampleSet
from agents.trainer.data.tally import Tally

NUM_SHOWN = 3
# Memory that a preview may take in addition to its libraries: it runs next to the user's programs.
_MEMORY_BYTES = 3 << 30
# Number of rows that the quick preview reads.
_NUM_READ = 64
# Number of rows whose columns the quick preview judges, and of characters at which it stops.
_NUM_JUDGED = 1000
_MAX_READ_CHARS = 1 << 23
# Maximum number of shown tokens of a conversation. The rest is only counted.
_MAX_TOKENS = 256
# Minimum number of tokens shown from the first learned one on.
_MIN_LEARNED = 32
_REPORT_INTERVAL_S = 1.0
# Time between two reports while another process does the work, in seconds.
_WAIT_INTERVAL_S = 5.0


def describe(
    examples: ExampleSet, tokenizer: Any, spec: RunSpec, *, plain_template: bool
) -> DataPreview:
    """Return the preview of a run's tokenized data."""
    found = [
        (name, _describe_one(member, tokenizer, spec, plain_template=plain_template))
        for name, member in examples.members
    ]
    if len(found) == 1:
        return replace(found[0][1], choice=examples.choice)
    # Evaluation takes each row once; its sources may be fewer.
    is_whole = len(found) == len(spec.data.list_sources())
    taken = order_rows(spec, examples.parts).taken if is_whole else examples.parts
    return replace(join_previews(found, spec, taken), choice=examples.choice)


def join_previews(
    found: Sequence[tuple[str, DataPreview]], spec: RunSpec, taken: Sequence[int] = ()
) -> DataPreview:
    """Return the preview of several sources together.

    Args:
        found: name and preview of each source.
        spec: run spec.
        taken: number of examples that an epoch takes of each source; empty: not known.
    """
    all_of = [one for _, one in found]
    fills = [one.fill * one.num_examples for one in all_of if one.fill is not None]
    num_examples = sum(one.num_examples for one in all_of)
    weights = {source.name: source.weight for source in spec.data.list_sources()}
    return replace(
        all_of[0],
        num_rows=sum(one.num_rows for one in all_of),
        num_examples=num_examples,
        num_tokens=sum(one.num_tokens for one in all_of),
        num_targets=sum(one.num_targets for one in all_of),
        longest_tokens=max(one.longest_tokens for one in all_of),
        fill=sum(fills) / num_examples if fills else None,
        num_skipped=sum(one.num_skipped for one in all_of),
        num_malformed=sum(one.num_malformed for one in all_of),
        num_truncated=sum(one.num_truncated for one in all_of),
        skipped=tuple(_name_source(name, row) for name, one in found for row in one.skipped),
        truncated=tuple(_name_source(name, row) for name, one in found for row in one.truncated),
        rows=tuple(
            replace(row, source=name)
            for name, one in found
            for row in one.rows[: max(1, NUM_SHOWN // len(found))]
        ),
        findings=sort_findings(
            replace(finding, source=name) for name, one in found for finding in one.findings
        ),
        sources=tuple(
            SourceShare(
                name=name,
                format=one.format,
                num_rows=one.num_rows,
                num_examples=one.num_examples,
                num_tokens=one.num_tokens,
                num_targets=one.num_targets,
                weight=weights.get(name, 1.0),
                num_in_epoch=taken[place] if taken else one.num_examples,
            )
            for place, (name, one) in enumerate(found)
        ),
    )


def _name_source(source: str, row: NamedRow) -> NamedRow:
    return replace(row, file="/".join(filter(None, (source, row.file))))


def _describe_one(
    examples: ExampleSet, tokenizer: Any, spec: RunSpec, *, plain_template: bool
) -> DataPreview:
    num_tokens = int(examples.num_tokens.sum(dtype="int64"))
    return DataPreview(
        format=examples.format,
        whole=True,
        num_rows=examples.num_rows,
        num_examples=len(examples),
        num_tokens=num_tokens,
        num_targets=int(examples.num_targets.sum(dtype="int64")),
        longest_tokens=int(examples.num_tokens.max()),
        sequence_tokens=spec.sequence_tokens,
        fill=num_tokens / len(examples) / spec.sequence_tokens if spec.packing else None,
        num_skipped=examples.num_skipped,
        num_malformed=examples.num_malformed,
        num_blank=examples.num_blank,
        num_truncated=examples.num_truncated,
        skipped=name_rows(examples.skipped),
        truncated=name_rows(examples.truncated),
        plain_template=plain_template,
        rows=tuple(show_row(tokenizer, row) for row in examples.first_rows(NUM_SHOWN)),
        findings=examples.findings,
    )


def describe_first(
    spec: RunSpec,
    tokenizer: Any,
    files: DataFiles,
    *,
    plain_template: bool,
    findings: Sequence[DataFinding] = (),
    num_known: int | None = None,
) -> DataPreview:
    """Return the preview of the first rows alone, which takes the same time for data of any size.

    Args:
        spec: run spec.
        tokenizer: the model's tokenizer.
        files: data files.
        plain_template: True if the tokenizer lacks a chat template.
        findings: findings from more rows than these.
        num_known: number of tokens that the model has weights for; None: not known.

    Raises:
        ExpectedError: the data cannot be read, or all of its first rows are unusable.
    """
    tally = Tally(name=files.name)
    reader = RowReader(files, spec.data, spec.objective, tally)
    rows = iter(reader)
    first = list(_take(rows, _NUM_READ))
    kept = list(
        tokenize_kept(iter(first), reader, tally, tokenizer, spec.sequence_tokens, spec.data)
    )
    # The limit of malformed rows is a fraction of all rows: it cannot be checked on the first ones.
    if len(first) < _NUM_READ or not kept:
        tally.check_usable(len(kept))
    beyond = find_beyond((one for row in kept for one in row.segments), tokenizer, num_known)
    sizes = [sum(len(segment.ids) for segment in row.segments) for row in kept]
    num_rows, num_skipped, num_malformed = tally.num_rows, tally.num_skipped, tally.num_malformed
    num_blank = tally.num_blank
    skipped = name_rows(tally.named)
    for _ in _take(rows, _NUM_JUDGED - len(first)):  # the meaning of columns needs more rows
        pass
    return DataPreview(
        format=reader.format,
        whole=False,
        num_rows=num_rows,
        num_examples=len(kept),
        num_tokens=sum(sizes),
        num_targets=sum(segment.num_targets for row in kept for segment in row.segments),
        longest_tokens=max(sizes),
        sequence_tokens=spec.sequence_tokens,
        num_skipped=num_skipped,
        num_malformed=num_malformed,
        num_blank=num_blank,
        num_truncated=tally.num_truncated,
        skipped=skipped,
        truncated=name_rows(tally.truncated),
        plain_template=plain_template,
        rows=tuple(show_row(tokenizer, row.segments) for row in kept[:NUM_SHOWN]),
        findings=sort_findings((*beyond, *(findings or reader.findings))),
    )


def find_beyond(
    segments: Iterable[Segment], tokenizer: Any, num_known: int | None
) -> tuple[DataFinding, ...]:
    """Return the finding about tokens for which the model has no weights.

    Args:
        segments: all rows.
        tokenizer: the model's tokenizer.
        num_known: number of tokens that the model has weights for; None: not known.
    """
    rows: dict[int, int] = {}
    total = 0
    for segment in segments if num_known is not None else ():
        total += 1
        highest = int(segment.ids.max(initial=-1))
        if num_known is not None and highest >= num_known:
            rows.setdefault(segment.row, highest)
    if not rows:
        return ()
    first = min(rows)
    return (
        DataFinding(
            kind="beyond",
            column=tokenizer.convert_ids_to_tokens(rows[first]),
            count=len(rows),
            total=max(total, len(rows)),
            consequence="refuse",
        ),
    )


def _count_known(folder: Path) -> int | None:
    """Return the number of tokens that a model has weights for, or None."""
    config = read_json(folder / "config.json")
    vocab = text_of(config).get("vocab_size") if isinstance(config, dict) else None
    return vocab if type(vocab) is int else None


def _take(rows: Iterator[ConversationRow], count: int) -> Iterator[ConversationRow]:
    """Yield the next rows, fewer if they are very long."""
    num_chars = 0
    for row in islice(rows, count):
        yield row
        num_chars += row.num_chars
        if num_chars > _MAX_READ_CHARS:
            return


def show_row(tokenizer: Any, segments: tuple[Segment, ...]) -> ShownRow:
    """Return one row as consecutive texts, each marked as learned or not."""
    return ShownRow(
        row=segments[0].row,
        conversations=tuple(
            ShownConversation(
                num_tokens=len(segment.ids),
                num_targets=segment.num_targets,
                parts=_cut_parts(tokenizer, segment),
            )
            for segment in segments
        ),
    )


def _cut_parts(tokenizer: Any, segment: Segment) -> tuple[ShownPart, ...]:
    """Return the beginning, and the first learned part if the beginning has no learned token."""
    first = int(np.argmax(segment.is_target))
    if first <= _MAX_TOKENS - _MIN_LEARNED:
        return _part(tokenizer, segment, 0, _MAX_TOKENS)
    half = _MAX_TOKENS // 2
    begin = first - half + _MIN_LEARNED
    left_out = ShownPart(text=f"\n[{begin - half:,} tokens are not shown]\n", learned=False)
    head = _part(tokenizer, segment, 0, half)
    return (*head, left_out, *_part(tokenizer, segment, begin, begin + half))


def _part(tokenizer: Any, segment: Segment, begin: int, end: int) -> tuple[ShownPart, ...]:
    ids, is_target = segment.ids[begin:end], segment.is_target[begin:end]
    changes = [i for i in range(1, len(ids)) if is_target[i] != is_target[i - 1]]
    ends = [*changes, len(ids)]
    return tuple(
        ShownPart(text=tokenizer.decode(ids[start:end]), learned=bool(is_target[start]))
        for start, end in zip([0, *changes], ends, strict=True)
    )


class _Progress:
    """Prints the progress of tokenizing once a second."""

    def __init__(self) -> None:
        self._reported_s = time.monotonic()

    def report(self, num_rows: int, share: float) -> None:
        if time.monotonic() - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = time.monotonic()
            _print("progress", message=f"{num_rows:,} rows tokenized, {share:.0%} of the data")

    def wait(self) -> None:
        """Print now and then that another process does the work, or this one seems to hang."""
        if time.monotonic() - self._reported_s >= _WAIT_INTERVAL_S:
            self._reported_s = time.monotonic()
            _print("progress", message="a run tokenizes the same data; the preview waits for it")


def _print(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def preview(job: PreviewJob, home: Path) -> DataPreview:
    """Return the preview that a job requests.

    Args:
        job: run spec with the paths of model and data.
        home: the agent's home folder, which holds the caches of tokens and hashes.

    Raises:
        ExpectedError: the tokenizer or the data is unusable.
    """
    from agents.trainer.data.tokenizer import load_tokenizer  # takes seconds; a count needs none

    folder = find_tokenizer(job.model_path)
    tokenizer, plain = load_tokenizer(folder, data=job.spec.data)
    num_known = _count_known(folder)
    if num_known is not None and job.spec.data.new_tokens:  # the trainer adds rows for them
        new = tokenizer.convert_tokens_to_ids(list(job.spec.data.new_tokens))
        num_known = max(num_known, max(new) + 1)
    spec, hashes = job.spec, home / "hashes"
    if job.held_out_from is not None:  # evaluation data is a source of its own
        files = find_data(job.train_path, held_out_from=job.held_out_from)
        spec = replace(spec, data=replace(spec.data, sources=(), eval=None, deduplicate="off"))
        sha256 = hash_files(files.paths, hashes)
        sources: tuple[DataSource, ...] = (
            DataSource(name="", spec=spec, files=files, sha256=sha256),
        )
    else:
        sources = find_sources(spec, (job.train_path, *job.more_paths), hashes)
    first = partial(_describe_first_of_all, spec, tokenizer, sources, plain_template=plain)
    if not job.whole:
        return first(num_known=num_known)
    progress = _Progress()
    evaluation = None
    if job.eval_path is not None:
        evaluation = find_data(job.eval_path, held_out_from=job.train_path)
    loader = DataLoader(
        spec=spec,
        sources=sources,
        tokenizer=tokenizer,
        cache=home / "cache" / "tokens",
        evaluation=evaluation,
        evaluation_sha256=hash_files(evaluation.paths, hashes) if evaluation else "",
        report=progress.report,
        wait=progress.wait,
    )
    try:
        examples = loader.load("eval" if job.held_out else "train")
    except RefusedData as refused:
        return first(refused=refused)
    if examples is None:
        raise ExpectedError(
            "The training data has too few rows to hold any out for evaluation.",
            "Give a file for evaluation, or a number of rows",
        )
    found = describe(examples, tokenizer, spec, plain_template=plain)
    if num_known is None or examples.vocab_size <= num_known:
        return found
    every = (part for place in range(len(examples)) for part in examples[place].segments)
    beyond = find_beyond(every, tokenizer, num_known)
    return replace(found, findings=sort_findings((*beyond, *found.findings)))


def _describe_first_of_all(
    spec: RunSpec,
    tokenizer: Any,
    sources: Sequence[DataSource],
    *,
    plain_template: bool,
    refused: RefusedData | None = None,
    num_known: int | None = None,
) -> DataPreview:
    """Return the preview of the first rows of every source."""
    found = []
    for source in sources:
        is_refused = refused is not None and refused.name == source.files.name
        one = describe_first(
            *(source.spec, tokenizer, source.files),
            plain_template=plain_template,
            findings=refused.findings if refused is not None and is_refused else (),
            num_known=num_known,
        )
        found.append((source.name, one))
    return found[0][1] if len(found) == 1 else join_previews(found, spec)


def _names_of(job: PreviewJob) -> dict[str, str]:
    """Return the run file's name of each place of a job on this node."""
    if job.held_out_from is None:
        paths = {"train": job.train_path, "held_out": job.eval_path or ""}
        return names_of(job.spec, model=job.model_path, more=job.more_paths, **paths)
    train, held_out = job.held_out_from, job.train_path
    # Both may be one place; then the name of the training data stands for it.
    return names_of(job.spec, model=job.model_path, held_out=held_out, train=train)


def main(argv: list[str]) -> int:
    """Write the report of a job; return the exit code."""
    job_path, report_path = map(Path, argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        job = from_wire(PreviewJob, json.loads(job_path.read_bytes()), "job")
        limit_memory(_MEMORY_BYTES)
        names = _names_of(job)
        with named_as_given(names):
            if job.count_s is not None:
                report = count(job, lambda text: _print("progress", message=text))
            else:
                report = preview(job, Path(os.environ.get("RACKLESS_AGENT_HOME") or "."))
        report_path.write_text(json.dumps(to_wire(report)), encoding="ascii")
    except (OSError, ValueError, WireError) as error:
        _print("failed", message=f"{job_path}: {error}", hint="")
        return 1
    except ExpectedError as error:
        _print("failed", message=error.message, hint=error.hint)
        return 1
    except MemoryError:
        most = _MEMORY_BYTES >> 30
        message = f"Reading {names[job.train_path]} takes more than {most} GiB of memory."
        _print("failed", message=message, hint="Write shorter rows, one per line (.jsonl)")
        return 1
    return 0

"""Report of a rank before its first step: the facts of the start, and data warnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.contract.parallel import find_mode
from agents.contract.run import AttemptIntent
from agents.shared.data.findings import hint_for, say_finding
from agents.trainer.data.store import ExampleSet
from agents.trainer.loop import TrainingSchedule
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.journal import RankJournal
from agents.trainer.training_state import TrainingState


def report_start(
    context: RankContext,
    state: TrainingState,
    schedule: TrainingSchedule,
    shares: tuple[float, ...],
) -> None:
    """Write the journal's `started` record, after warnings about the data."""
    intent = context.attempt.intent
    for message, hint in find_shortages(intent, len(state.train), len(shares)):
        context.journal.write("warning", message=message, hint=hint)
    # As the run file names them: a node keeps data below a name of its own.
    data = intent.spec.data
    train = ", ".join(source.name for source in data.list_sources())
    _warn_of_findings(context.journal, state.train, train)
    # Held-out rows come from the same files, of which the lines above have told.
    if state.evaluation is not None and intent.eval_path:
        held_out = Path(data.eval_path or intent.eval_path).name
        _warn_of_rows(context.journal, state.evaluation, held_out)
        _warn_of_findings(context.journal, state.evaluation, held_out)
    if data.held_out is not None and state.evaluation is None:
        context.journal.write(
            "warning",
            message="The training data has too few rows to hold any out for evaluation.",
            hint="Give a file for evaluation, or a number of rows, or continue without",
        )
    peak = schedule.speeds.peak
    context.journal.write(
        "started",
        step=schedule.first_step - 1,
        total_steps=schedule.total_steps,
        shares=list(shares),
        solo_tokens_per_s=schedule.speeds.solo_tokens_per_s,
        peak_flops_per_s=peak.flops_per_s if peak else None,
        peak_measured=peak.measured if peak else None,
        world_size=len(shares),
        data=train,
        versions=state.versions,
        **_describe_data(state.train),
    )


def _describe_data(train: ExampleSet) -> dict[str, Any]:
    return {
        "num_rows": train.num_rows - train.num_skipped,
        "num_examples": len(train),
        "num_tokens": int(train.num_tokens.sum()),
        "skipped": [{"row": item.row, "reason": item.in_words} for item in train.skipped],
        "num_skipped": train.num_skipped,
        "num_malformed": train.num_malformed,
        "format": train.format,
        "truncated": train.num_truncated,
    }


def find_shortages(
    intent: AttemptIntent, num_examples: int, world_size: int
) -> Iterator[tuple[str, str]]:
    """Yield message and hint if a batch, or the number of workers, exceeds the examples.

    The ranks of a pipeline are one worker, since all of them compute each row.
    """
    size, noun = intent.spec.batch_sequences, "pack" if intent.spec.packing else "row"
    of_rows = " of rows" if intent.spec.packing else ""
    is_one = num_examples == 1
    num_workers, workers, hint = world_size, "ranks", "Use one GPU: with so few rows it is as fast"
    # A pipeline computes each row on all of its ranks, so only its replicas divide a batch.
    if find_mode(intent.parallel).has_stages:
        num_workers = max(1, intent.cut.num_replicas) if intent.cut is not None else 1
        workers = "pipelines"
        hint = "Name fewer GPUs in nodes: with so few rows they are as fast"
    if num_workers <= num_examples < size:
        # Not an error: an order cycles through the data as often as a batch needs.
        rows = f"only {noun}{of_rows}" if is_one else f"{num_examples} {noun}s{of_rows}"
        yield (
            f"A batch of {size} sequences takes the {rows} of the data more than once.",
            f"Set batch_sequences to {num_examples} or less, or continue: a step exceeds an epoch",
        )
    if num_examples < num_workers:
        what = f"is 1 {noun}{of_rows}" if is_one else f"are {num_examples} {noun}s{of_rows}"
        yield f"There {what} for {num_workers} {workers}.", hint


def _warn_of_findings(journal: RankJournal, examples: ExampleSet, name: str) -> None:
    """Warn of data that is trained differently from its meaning; the preview lists unused data."""
    for finding in examples.findings:
        if finding.consequence != "note":
            journal.write(
                "warning",
                message=f"{'' if finding.source else f'{name}: '}{say_finding(finding)}.",
                hint=f"{hint_for(finding)}, or continue",
            )


def _warn_of_rows(journal: RankJournal, evaluation: ExampleSet, name: str) -> None:
    """Warn of evaluation rows that are left out or cut.

    Those of the training data are part of the `started` record.
    """
    left_out = (evaluation.num_skipped, "left out", evaluation.skipped)
    cut = (evaluation.num_truncated, "cut", evaluation.truncated)
    hints = (
        "Correct data.eval, or continue without them",
        "Raise sequence_tokens, or continue with their beginnings",
    )
    for (count, done, named), hint in zip((left_out, cut), hints, strict=True):
        if count:
            journal.write(
                "warning",
                message=f"Of {evaluation.num_rows} rows of {name} {count} "
                f"{'is' if count == 1 else 'are'} {done} "
                f"(the first, row {named[0].row}: {named[0].in_words}).",
                hint=hint,
            )

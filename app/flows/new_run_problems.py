"""Problems of the New run answers: missing, not a number, out of limits, or in conflict.

The limits are those of RunSpec, reported while the answer can still be changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from agents.contract.objectives import (
    OBJECTIVES,
    ROW_FORMATS,
    ObjectiveTraits,
    find_readers,
    has_key,
    join_or,
)
from agents.contract.parallel import refuse_parallel, refuse_trained_weights
from agents.contract.spec import MAX_COUNT, MAX_SEED, MOST, refuse_pattern
from app.flows.field import YES
from app.flows.new_run_answers import (
    RunAnswers,
    read_decimal,
    read_shares,
    read_targets,
    read_whole,
    repeat,
    to_spec,
)
from app.text import capitalize

ADAPTER_KEYS = frozenset({"rank", "alpha", "dropout", "targets", "rslora", "dora", "experts"})
Problem = tuple[str, str]
"""A problem, as (field key, sentence)."""


def is_asked(key: str, answers: RunAnswers) -> bool:
    """Return whether a question applies, given the other answers."""
    if key in ADAPTER_KEYS:
        return answers.adapter != "full"
    return has_key(answers.objective, key)


def find_problems(answers: RunAnswers) -> list[Problem]:
    """Return every problem of the answers; the first one of a field counts."""
    found = [*_missing(answers), *_numbers(answers), *_contradictions(answers)]
    # A field that is not shown cannot be corrected, so it must not block the run.
    found = [(key, text) for key, text in found if is_asked(key, answers)]
    if found:
        return found
    try:
        # Last: RunSpec stops at its first problem, and names the field only in its text.
        to_spec(answers)
    except ValueError as error:
        return [(_key_of(str(error)), f"{error}.")]
    return []


def _key_of(text: str) -> str:
    """Return the field of a limit of RunSpec, whose text begins with the key's name."""
    key = text.split(" ", 1)[0].rpartition(".")[2]
    return key if hasattr(RunAnswers(), key) else "name"


def _missing(answers: RunAnswers) -> Iterator[Problem]:
    if not answers.name.strip():
        yield "name", "Give the run a name."
    if not answers.model.strip():
        yield "model", "Enter a Hugging Face id or choose a model folder."
    if not answers.train.strip():
        yield "train", "Choose a file with training data."
    targets = read_targets(answers.targets)
    if not targets:
        yield "targets", "Enter all-linear or the names of layers."
    elif isinstance(targets, str):
        yield from _pattern(targets)


def _pattern(text: str) -> Iterator[Problem]:
    try:
        re.compile(text)
    # Huge repeat counts raise OverflowError, deep nesting RecursionError.
    except (re.error, OverflowError, RecursionError) as error:
        said = f"'{repeat(text)}' is not a regular expression: {error}"
        yield "targets", f"{said}. You can also enter names separated by commas."
        return
    if refusal := refuse_pattern(text):
        yield "targets", f"{capitalize(refusal.removeprefix('is '))}."


def _contradictions(answers: RunAnswers) -> Iterator[Problem]:
    objective = OBJECTIVES[answers.objective]
    if answers.packing == YES and not objective.packs:
        others = join_or([row.label for row in OBJECTIVES.values() if row.packs])
        yield (
            "packing",
            f"{objective.label} cannot pack {objective.units}. Turn this off, or choose {others}.",
        )
    # `auto` is never a contradiction here: nodes detect the format from the first rows.
    if answers.format != "auto" and answers.format not in objective.formats:
        yield "format", _refuse_format(objective, answers.format)
    refusal = refuse_parallel(answers.parallel)
    if refusal := refusal or refuse_trained_weights(answers.parallel, answers.adapter):
        yield "parallel", f"{refusal[0]}."


def _refuse_format(objective: ObjectiveTraits, row_format: str) -> str:
    readers = find_readers(row_format)
    labels = join_or([row.label for row in readers])
    kind = ROW_FORMATS[row_format]
    if kind.contents:
        return (
            f"{capitalize(kind.rows)} are for {labels}. Choose {labels} above, or another format."
        )
    rows = join_or([ROW_FORMATS[name].rows for name in objective.formats])
    return f"{objective.label} needs {rows}. Choose them here, or choose {labels} above."


# ---------------------------------------------------------------- numbers


def _numbers(answers: RunAnswers) -> Iterator[Problem]:
    ask_whole, ask_decimal = (
        partial(_number, answers, read_whole, most=MAX_COUNT),
        partial(_number, answers, read_decimal),
    )
    yield from ask_whole("rank", low=1, most=MOST["adapter.rank"])
    yield from ask_decimal("alpha", above=0, most=MOST["adapter.alpha"])
    yield from ask_decimal("dropout", low=0, below=1)
    yield from ask_decimal("dpo_beta", above=0, most=MOST["dpo_beta"])
    yield from ask_whole("sequence_tokens", low=8, most=MOST["sequence_tokens"])
    yield from ask_whole("batch_sequences", low=1, most=MOST["batch_sequences"])
    yield from ask_decimal("epochs", above=0, most=MOST["epochs"])
    yield from ask_whole("max_steps", low=1, optional=True)
    yield from ask_decimal("learning_rate", above=0, most=MOST["learning_rate"])
    yield from ask_decimal("warmup_share", low=0, below=1)
    yield from ask_decimal("weight_decay", low=0, most=MOST["weight_decay"])
    yield from ask_decimal("max_gradient_norm", above=0)
    yield from ask_whole("seed", low=0, most=MAX_SEED)
    yield from ask_whole("evaluate_every_steps", low=1, optional=True)
    yield from ask_decimal("memory_gib", above=0, most=MAX_COUNT, optional=True)
    yield from _shares(answers)
    yield from ask_decimal("every_minutes", above=0, optional=True)
    yield from ask_whole("every_steps", low=1, optional=True)
    yield from ask_whole("keep", low=1)
    yield from ask_whole("copies", low=1)


def _number(
    answers: RunAnswers,
    read: Callable[[str], float],
    key: str,
    *,
    low: int | None = None,
    above: int | None = None,
    below: int | None = None,
    most: float | None = None,
    optional: bool = False,
) -> Iterator[Problem]:
    text: str = getattr(answers, key).strip()
    if not text:
        if not optional:
            yield key, "Enter a number."
        return
    try:
        value = read(text)
    except ValueError as error:
        yield key, f"{error}."
        return
    said = repeat(text)
    if low is not None and value < low:
        yield key, f"{said} is too small. The minimum is {low:,}."
    if above is not None and value <= above:
        yield key, f"{said} is too small. It must be above {above:,}."
    if below is not None and value >= below:
        yield key, f"{said} is too large. It must be below {below:,}."
    if most is not None and value > most:
        yield key, f"{said} is too large. The maximum is {most:,}."


def _shares(answers: RunAnswers) -> Iterator[Problem]:
    try:
        shares = read_shares(answers.shares)
    except ValueError as error:
        yield "shares", f"{error}."
        return
    if answers.shares.strip() and (not shares or min(shares) <= 0):
        yield "shares", "Every share must be above 0."

"""Problems of the New run answers: missing, not a number, out of limits, or in conflict.

The limits are those of RunSpec, reported while the answer can still be changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from agents.contract.key import MAX_COUNT, RunKey
from agents.contract.objectives import (
    OBJECTIVES,
    ROW_FORMATS,
    ObjectiveTraits,
    find_readers,
    join_or,
)
from agents.contract.parallel import refuse_parallel, refuse_trained_weights
from agents.contract.spec import refuse_pattern, run_keys
from app.flows.new_run_answers import YES, RunAnswers, is_asked, read_answer, repeat, to_spec
from app.text import capitalize

Problem = tuple[str, str]
"""A problem, as (key, sentence)."""


def find_problems(answers: RunAnswers) -> list[Problem]:
    """Return every problem of the answers; the first one of a field counts."""
    found = [*_missing(answers), *_values(answers), *_contradictions(answers)]
    keys = run_keys()
    # A field that is not shown cannot be corrected, so it must not block the run.
    found = [(key, text) for key, text in found if is_asked(keys[key], answers)]
    if found:
        return found
    try:
        # Last: RunSpec stops at its first problem, and names the field only in its text.
        to_spec(answers)
    except ValueError as error:
        return [_problem_of(str(error))]
    return []


def _problem_of(text: str) -> Problem:
    """Return the problem of a rule of RunSpec, whose text begins with the key, or its last part."""
    named, _, rest = text.partition(" ")
    key = next((key for key in run_keys().values() if f".{key.name}".endswith(f".{named}")), None)
    if key is None:
        return "name", f"{capitalize(text)}."
    # The form shows labels, while RunSpec names the keys of a run file.
    return key.name, f"{key.about.label} {rest}."


def _missing(answers: RunAnswers) -> Iterator[Problem]:
    if not answers["name"].strip():
        yield "name", "Give the run a name."
    if not answers["model"].strip():
        yield "model", "Enter a Hugging Face id or choose a model folder."
    if not answers["data.train"].strip():
        yield "data.train", "Choose a file with training data."


def _refuse_pattern(text: str) -> str:
    try:
        re.compile(text)
    # Huge repeat counts raise OverflowError, deep nesting RecursionError.
    except (re.error, OverflowError, RecursionError) as error:
        said = f"'{repeat(text)}' is not a regular expression: {error}"
        return f"{said}. You can also enter names separated by commas."
    refusal = refuse_pattern(text)
    return f"{capitalize(refusal.removeprefix('is '))}." if refusal else ""


def _contradictions(answers: RunAnswers) -> Iterator[Problem]:
    objective = OBJECTIVES[answers["objective"]]
    if answers["packing"] == YES and not objective.packs:
        others = join_or([row.label for row in OBJECTIVES.values() if row.packs])
        yield (
            "packing",
            f"{objective.label} cannot pack {objective.units}. Turn this off, or choose {others}.",
        )
    # `auto` is never a contradiction here: nodes detect the format from the first rows.
    row_format = answers["data.format"]
    if row_format != "auto" and row_format not in objective.formats:
        yield "data.format", _refuse_format(objective, row_format)
    refusal = refuse_parallel(answers["parallel"])
    if refusal := refusal or refuse_trained_weights(answers["parallel"], answers["adapter.kind"]):
        yield "parallel", f"{refusal[0]}."


def _refuse_format(objective: ObjectiveTraits, row_format: str) -> str:
    labels = join_or([row.label for row in find_readers(row_format)])
    kind = ROW_FORMATS[row_format]
    if kind.contents:
        rows = capitalize(kind.rows)
        return f"{rows} are for {labels}. Choose {labels} above, or another format."
    wanted = join_or([ROW_FORMATS[name].rows for name in objective.formats])
    return f"{objective.label} needs {wanted}. Choose them here, or choose {labels} above."


# ---------------------------------------------------------------- values


def _values(answers: RunAnswers) -> Iterator[Problem]:
    for key in run_keys().values():
        if problem := _find_problem(key, answers[key.name].strip()):
            yield key.name, problem


def _find_problem(key: RunKey, text: str) -> str:
    """Return why an answer is not usable, as a sentence; empty: it is."""
    is_number = key.kind in ("whole", "decimal")
    if is_number and not text:
        return "" if key.is_optional else "Enter a number."
    try:
        value = read_answer(key, text)
    except ValueError as error:
        return f"{error}."
    if is_number:
        return _find_excess(key, value, repeat(text))
    if key.name == "adapter.targets":
        if not value:
            return "Enter all-linear or the names of layers."
        return _refuse_pattern(value) if isinstance(value, str) else ""
    if key.name == "shares" and text and (not value or min(value) <= 0):
        return "Every share must be above 0."
    return ""


def _find_excess(key: RunKey, value: float, said: str) -> str:
    about = key.about
    maximum = MAX_COUNT if key.kind == "whole" and about.maximum is None else about.maximum
    if about.minimum is not None and value < about.minimum:
        return f"{said} is too small. The minimum is {about.minimum:,}."
    if about.above is not None and value <= about.above:
        return f"{said} is too small. It must be above {about.above:,}."
    if about.below is not None and value >= about.below:
        return f"{said} is too large. It must be below {about.below:,}."
    if maximum is not None and value > maximum:
        return f"{said} is too large. The maximum is {maximum:,}."
    return ""

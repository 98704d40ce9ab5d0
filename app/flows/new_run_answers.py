"""The answers of the New run dialog, and their lossless conversion to a RunSpec and back.

Answers are texts as typed, so that an unfinished number is an answer too and no input is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agents.contract.data import SourceSpec
from agents.contract.key import RunKey
from agents.contract.spec import PATTERN_SIGNS, DataSpec, RunSpec, run_keys
from agents.contract.wire import to_wire
from app.planning.advice.changes import apply_change
from app.text import shorten, show_exponent

RunAnswers = Mapping[str, str]
"""Key of the run file -> its answer, for every key."""
ALL_NODES = "all"
YES, NO = "true", "false"
"""Answers of a checkbox, written as in a run file."""
MOST_REPEATED = 20
"""Maximum length of an answer that a message quotes, in characters."""
# Digits, in one piece or in groups of three.
_WHOLE = re.compile(r"[+-]?(\d+|\d{1,3}([ ,_]\d{3})+)")
_USUAL = RunSpec(model="-", data=DataSpec(train="-"))


def usual_answers() -> RunAnswers:
    """Return the answers of a form in which nothing was typed."""
    return {**to_answers(_USUAL), "model": "", "data.train": ""}


def proposed_answers() -> RunAnswers:
    """Return the answers that a new form begins with: those, and a part held out to evaluate."""
    return {**usual_answers(), "data.eval": "auto"}


def is_asked(key: RunKey, answers: RunAnswers) -> bool:
    """Return whether a question applies, given the other answers."""
    if key.about.only_with is None:
        return True
    other, values = key.about.only_with
    return answers[other] in values


def to_spec(answers: RunAnswers) -> RunSpec:
    """Convert answers to a spec.

    Raises:
        ValueError: an answer is not usable, or two contradict each other.
    """
    values = {key.name: _value(key, answers) for key in run_keys().values()}
    if sources := values["data.sources"]:
        # The first source has a field of its own.
        first = replace(sources[0], path=values["data.train"])
        values["data.sources"] = (first, *sources[1:])
    spec = apply_change(_USUAL, values)
    return replace(spec, data=spec.data.simplify())


def _value(key: RunKey, answers: RunAnswers) -> Any:
    text = answers[key.name]
    if is_asked(key, answers):
        return read_answer(key, text)
    # A tick that has no effect contradicts what has turned it off.
    if key.kind == "tick":
        return key.default
    # Other answers without effect are kept if usable, so that a run file comes back unchanged.
    try:
        value = read_answer(key, text)
        apply_change(_USUAL, {key.name: value})
    except ValueError:
        return key.default
    return value


def to_answers(spec: RunSpec) -> dict[str, str]:
    """Convert a spec to answers, for an opened run file or a repeated run."""
    return {key.name: _shown(key.value_in(spec)) for key in run_keys().values()}


def use_recipe(answers: RunAnswers, recipe: RunSpec) -> RunAnswers:
    """Return the answers of a recipe, with name, model, data and nodes of `answers`."""
    # A recipe brings settings; its own model and data are only those it was saved with.
    kept = ("name", "model", "data.train", "data.sources", "data.eval", "nodes")
    found = {**to_answers(recipe), **{key: answers[key] for key in kept}}
    if not found["data.eval"] and recipe.data.held_out is not None:
        found["data.eval"] = str(recipe.data.eval)  # a part of any data
    return found


# ---------------------------------------------------------------- texts as typed


def read_answer(key: RunKey, text: str) -> Any:
    """Return the value of an answer, by the type of its key.

    Raises:
        ValueError: the text is no such value.
    """
    text = text.strip()
    if key.is_optional and not text:
        return None
    if key.kind == "tick":
        return text == YES
    if key.kind == "whole":
        return read_whole(text)
    if key.kind == "decimal":
        return read_decimal(text)
    if key.kind == "sources":
        return read_sources(text)
    if key.kind == "numbers":
        return tuple(read_decimal(number) for number in split_names(text))
    # By text: `8` is the number 8 where the words are numbers.
    words = {str(word): word for word in key.words}
    if text in words:
        return words[text]
    if key.kind == "choice":
        raise ValueError(f"'{repeat(text)}' is not one of {', '.join(words)}")
    # A regular expression may contain commas, so it is never split.
    is_pattern = str in key.options and PATTERN_SIGNS.intersection(text)
    return text if key.kind == "text" or is_pattern else split_names(text)


def read_sources(text: str) -> tuple[SourceSpec, ...]:
    """Read sources of training data, a list of objects in JSON; a weight may be a text as typed.

    Raises:
        ValueError: a source is not usable; it names its number.

    >>> read_sources('[{"path": "a"}, {"path": "b", "weight": "0,5"}]')[1].weight
    0.5
    """
    found = []
    for number, plain in enumerate(json.loads(text) if text else (), start=1):
        try:
            if isinstance(weight := plain.get("weight"), str):
                plain = {**plain, "weight": read_decimal(weight)}
            found.append(SourceSpec(**{**plain, "columns": tuple(plain.get("columns", ()))}))
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"Source {number}: {error}") from None
    return tuple(found)


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated text into names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def repeat(text: str) -> str:
    """Shorten an answer to quote it in a message."""
    return shorten(text, MOST_REPEATED)


def read_whole(text: str) -> int:
    """Read a whole number, such as `1024`, `1,024` or `1 024`, but not `1,5`.

    Raises:
        ValueError: the text is not a whole number.
    """
    try:
        if not _WHOLE.fullmatch(text.strip()):
            raise ValueError(text)
        return int(re.sub("[ ,_]", "", text))
    except ValueError:  # of `int`, too: a text of thousands of digits
        raise ValueError(f"'{repeat(text)}' is not a whole number") from None


def read_decimal(text: str) -> float:
    """Read a finite number, with a decimal point or comma.

    Raises:
        ValueError: the text is not a finite number.
    """
    try:
        value = float(text.strip().replace(",", "."))
    except ValueError:
        raise ValueError(f"'{repeat(text)}' is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"'{repeat(text)}' is not a finite number")
    return value


def _shown(value: Any) -> str:
    """Return a value as a user would write it, without losing precision.

    >>> _shown(2e-4), _shown(0.05), _shown((1.0, 2.5)), _shown(True)
    ('2e-4', '0.05', '1, 2.5', 'true')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return YES if value else NO
    if isinstance(value, tuple) and value and isinstance(value[0], SourceSpec):
        return json.dumps(to_wire(value))
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if not isinstance(value, float):
        return str(value)
    # `g` keeps six digits; a value with more is shown in full below.
    short = f"{value:g}"
    if 0 < abs(value) < 0.001:
        short = show_exponent(value, digits=6)
    return short if float(short) == value else str(value)


# ---------------------------------------------------------------- drafts


def to_draft(answers: RunAnswers, untouched: RunAnswers) -> dict[str, str]:
    """Return the answers of an abandoned form that differ from its initial ones.

    >>> to_draft({"name": "a", "adapter.rank": "8"}, {"name": "a", "adapter.rank": "16"})
    {'adapter.rank': '8'}
    """
    return {key: text for key, text in answers.items() if text != untouched[key]}


def take_up(draft: Mapping[str, object], untouched: RunAnswers) -> RunAnswers:
    """Return the answers of a draft; keys without a question in this version are left out.

    >>> take_up({"rank": "8", "gone": "1", "adapter.alpha": 3}, usual_answers())["adapter.rank"]
    '8'
    """
    # Drafts are stored between versions: an old one may have other keys or types. The first
    # versions stored `rank` for `adapter.rank`, and `adapter` for its kind.
    names = {name.rpartition(".")[2]: name for name in untouched} | {"adapter": "adapter.kind"}
    texts = {names.get(key, key): text for key, text in draft.items()}
    kept = {key: text for key, text in texts.items() if key in untouched and isinstance(text, str)}
    return {**untouched, **kept}

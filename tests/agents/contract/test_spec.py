"""Keys of the run file: each says at its field everything that form, guide and errors need."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest

from agents.contract.key import MAX_COUNT, Key, check_limits, keys_of
from agents.contract.spec import GROUPS, MAX_SEED, DataSpec, RunSpec, run_keys
from app.runs.lifecycle.resume import Changes


@pytest.mark.parametrize("key", run_keys().values(), ids=lambda key: key.name)
def test_each_key_says_what_a_form_and_a_guide_need(key) -> None:
    about = key.about
    assert about.label[0].isupper() or about.label.startswith("rsLoRA")
    assert len(about.help) > 20
    assert about.group in GROUPS
    assert "`" not in f"{about.label}{about.help}", "the window shows no Markdown"
    words = [value for value, _ in about.choices]
    assert set(words) <= set(map(str, key.words))
    assert (str(key.default) in words) == (key.kind == "choice")
    for other in (about.after, about.only_with[0] if about.only_with else ""):
        assert other == "" or other in run_keys()
    if about.only_with:
        assert set(about.only_with[1]) < set(run_keys()[about.only_with[0]].words)
    if key.kind in ("whole", "decimal"):
        assert about.minimum is not None or about.above is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    share: Annotated[
        float | None, Key(label="", help="", group="", minimum=0, maximum=2, reason=": why")
    ] = None
    number: Annotated[int, Key(label="", help="", group="", above=3)] = 4

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    part: _Part


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"share": -0.5}, "share is -0.5; it must be at least 0"),
        ({"share": 2.5}, "share is 2.5; it must be at most 2: why"),
        ({"share": float("nan")}, "share is nan; it must be a finite number"),
        ({"number": 3}, "number is 3; it must be above 3"),
        ({"number": MAX_COUNT + 1}, "number is 1000000000000001; it must be at most 1,000,"),
        ({"number": 10**70}, "number is a number of more than 60 digits; it must be at most"),
    ],
)
def test_a_key_is_checked_against_the_limits_at_its_field(values, words) -> None:
    with pytest.raises(ValueError, match=words):
        _Part(**values)
    assert list(keys_of(_Whole)) == ["part.share", "part.number"]


def test_the_largest_values_are_allowed() -> None:
    spec = RunSpec(model="m", data=DataSpec(train="t"), seed=MAX_SEED, max_steps=MAX_COUNT)
    assert (spec.seed, spec.max_steps) == (MAX_SEED, MAX_COUNT)


def test_what_a_resume_takes_is_what_it_may_change() -> None:
    for name in ("nodes", *(field.name for field in fields(Changes))):
        assert run_keys()[name].about.may_change, name

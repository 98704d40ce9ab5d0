"""Every reader of foreign input raises what it declares, whatever comes; for 30 s in all.

Ten minutes by hand: python -m tests.hostile.fuzz --minutes 10 --seed 7
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hostile.fuzzing import Target, find_targets, run_target

TOTAL_S = 30.0
TARGETS = find_targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_foreign_input_ends_in_a_value_or_a_declared_error(
    target: Target, attack: Callable[..., None]
) -> None:
    outcome = run_target(target, TOTAL_S / len(TARGETS), number=1)
    errors = ", ".join(f"{n} {name}" for name, n in outcome.errors.most_common()) or "no error"
    attack(
        given=f"{outcome.inputs} inputs of {target.name}",
        tried="to make it raise what it does not declare",
        happened=outcome.finding or errors,
    )
    assert not outcome.finding

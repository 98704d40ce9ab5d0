"""Whatever a node says to whatever is asked, only its own run's mirror changes, and nothing hangs.

Thousands by hand: python -m tests.hostile.node_zoo --minutes 10 --seed 7
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agents.contract.requests import NodeRequest
from agents.contract.wire import WireError, from_wire
from app.core.action import list_actions
from tests.hostile.node_zoo import drive
from tests.hostile.zoo import LEFT_OUT, Lies, Zoo, list_requests

SECONDS = 15.0


def test_no_action_of_the_core_is_harmed_by_a_node_that_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[..., None]
) -> None:
    zoo = Zoo(folder=tmp_path)
    zoo.prepare(monkeypatch)
    found = asyncio.run(drive(zoo, SECONDS, seed=0))
    outcomes = ", ".join(f"{n} {name}" for name, n in zoo.outcomes.most_common())
    attack(
        given=f"nodes that answer {sum(zoo.asked.values())} requests of {len(zoo.asked)} kinds",
        tried=f"to harm this PC in {sum(zoo.outcomes.values())} actions",
        happened="; ".join(found) or outcomes,
    )
    assert found == []
    assert len(zoo.asked) >= 40, "the zoo was hardly asked"
    assert set(LEFT_OUT) <= set(list_actions())


REQUESTS = sorted((cls for cls in list_requests() if cls.answer is not type(None)), key=str)


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=tuple(HealthCheck),
)
@given(st.sampled_from(REQUESTS), st.integers(0, 2**32))
def test_every_answer_is_read_or_refused_as_one_of_a_wrong_form(
    cls: type[NodeRequest[Any]], seed: int
) -> None:
    """The lies of the zoo reach every class of requests, also those that no action asks here."""
    said = Lies(seed, Path("/victim")).answer(cls, {})
    with contextlib.suppress(WireError):
        repr(from_wire(cls.answer, said))

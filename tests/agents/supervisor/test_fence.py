"""Claims of attempt numbers: each is granted once, and an older attempt never starts after it."""

from __future__ import annotations

import pytest

from agents.errors import ExpectedError
from agents.supervisor.fence import claim_attempt, raise_fence, read_fence
from tests.agents.supervisor.conftest import Node


def test_a_number_is_granted_once_and_never_over_an_attempt_that_the_claimer_does_not_know(
    node: Node,
) -> None:
    node.launch("finish")
    assert claim_attempt(node.home, "run-1", 2, replaces=1).is_granted
    assert not claim_attempt(node.home, "run-1", 2, replaces=1).is_granted, "to nobody else"
    assert claim_attempt(node.home, "run-1", 3, replaces=1).fence == 3
    with pytest.raises(ExpectedError, match="out of date"):
        node.launch("finish", attempt=2)
    node.wait_end(node.launch("finish", attempt=3))
    refused = claim_attempt(node.home, "run-1", 4, replaces=1)
    assert (refused.is_granted, refused.launched, refused.fence) == (False, 3, 3)
    assert read_fence(node.home, "run-1") == 3, "a refused claim changes nothing"
    assert raise_fence(node.home, "run-1", 5) == 5, "a person's resume is no claim"
    assert not claim_attempt(node.home, "unknown", 1, replaces=0).is_granted

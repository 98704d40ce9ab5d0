"""Only a master's signature or the consents of a majority prove an attempt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from agents.contract.election import is_majority
from agents.contract.mandate import (
    AttemptProof,
    Handover,
    Mandate,
    consent_bytes,
    prove,
    sign_mandate,
)
from agents.contract.signatures import public_key, sign
from agents.contract.spec import DataSpec, RunSpec
from agents.contract.wire import from_wire, to_wire
from tests.draws import random_bytes

SEEDS = {name: random_bytes(32, of=name).hex() for name in ("master", "a", "b", "c", "d")}
MANDATE = Mandate(
    run_id="r1",
    attempt=2,
    spec=RunSpec(model="m", data=DataSpec(train="t.jsonl")),
    places=(("a", "cpu"), ("a", "GPU-1"), ("b", "cpu"), ("c", "cpu")),
    node_keys={node: public_key(SEEDS[node]) for node in "abc"},
)
SIGNED = sign_mandate(MANDATE, public_key(SEEDS["master"]), partial(sign, SEEDS["master"]))


def hand_over(attempt: int, replaces: int, *nodes: str, run_id: str = "r1") -> Handover:
    consents = {
        node: sign(SEEDS[node], consent_bytes(run_id, attempt, replaces, node)) for node in nodes
    }
    return Handover(attempt=attempt, replaces=replaces, consents=consents)


def test_a_signed_mandate_is_read_after_the_wire() -> None:
    proof = from_wire(AttemptProof, to_wire(AttemptProof(mandate=SIGNED)), "proof")
    found = prove(proof, is_majority)
    assert found is not None
    assert (found.mandate, found.attempt, found.nodes) == (MANDATE, 2, ("a", "b", "c"))


def test_a_majority_of_each_attempt_continues_it() -> None:
    handovers = (hand_over(3, 2, "b", "c"), hand_over(5, 3, "b"))
    found = prove(AttemptProof(mandate=SIGNED, handovers=handovers), is_majority)
    assert found is not None
    assert (found.attempt, found.nodes) == (5, ("b",))


@pytest.mark.parametrize(
    "handovers",
    [
        (hand_over(3, 2, "b"),),  # a minority
        (hand_over(3, 2),),
        (hand_over(3, 1, "b", "c"),),  # of another attempt
        (hand_over(2, 2, "b", "c"),),
        (hand_over(3, 2, "b", "c", run_id="r2"),),
        (hand_over(3, 2, "b", "d"),),  # not a node of the run
        (hand_over(3, 2, "b", "c"), hand_over(4, 3, "c")),  # of two, the second is no majority
        (hand_over(3, 2, "b", "c"), hand_over(4, 3, "a", "b")),  # a was left out
        (replace(hand_over(3, 2, "b", "c"), consents={"b": "00" * 64, "c": "00" * 64}),),
    ],
)
def test_any_other_handover_proves_nothing(handovers: tuple[Handover, ...]) -> None:
    assert prove(AttemptProof(mandate=SIGNED, handovers=handovers), is_majority) is None


def test_an_altered_or_foreign_mandate_proves_nothing() -> None:
    altered = replace(SIGNED, text=SIGNED.text.replace("t.jsonl", "diary.txt"))
    assert prove(AttemptProof(mandate=altered), is_majority) is None
    other_key = replace(SIGNED, key=public_key(SEEDS["a"]))
    assert prove(AttemptProof(mandate=other_key), is_majority) is None
    own = sign_mandate(MANDATE, public_key(SEEDS["a"]), partial(sign, SEEDS["a"]))
    found = prove(AttemptProof(mandate=own), is_majority)
    # Verifies, but by another key than the home's: callers compare it.
    assert found is not None
    assert found.master_key == public_key(SEEDS["a"])

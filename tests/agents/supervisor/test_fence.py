"""Claims of attempt numbers: each is granted once, and an older attempt never starts after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.mandate import AttemptProof, Mandate, sign_mandate
from agents.contract.run import AttemptIntent
from agents.contract.run_layout import INTENT_FILE
from agents.contract.signatures import make_seed, public_key, sign
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.state import write_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.fence import claim_attempt, find_newest_launched, raise_fence, read_fence
from agents.supervisor.launch import launch
from agents.supervisor.ownership import end_strays, keep_all_owned
from agents.supervisor.stop import stop
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


def signed(intent: AttemptIntent, seed: str) -> AttemptIntent:
    """Return the intent with a mandate of the master whose private key is `seed`."""
    node_seed = make_seed()
    mandate = Mandate(
        run_id=intent.run_id,
        attempt=intent.attempt,
        spec=intent.spec,
        places=tuple((place.node, place.device_id) for place in intent.ranks),
        node_keys={intent.node: public_key(node_seed)},
    )
    text = sign_mandate(mandate, public_key(seed), lambda message: sign(seed, message))
    return replace(intent, proof=AttemptProof(mandate=text), node_seed=node_seed)


def test_an_attempt_that_was_only_put_into_the_folder_ends_nothing(node: Node) -> None:
    seed = make_seed()
    launch(node.home, signed(node.intent("train"), seed))
    for number, intent in (
        (7, signed(node.intent("train", attempt=7), make_seed())),  # by the key of another master
        (8, signed(node.intent("train", attempt=1), seed)),  # a copy of the genuine one
        (9, node.intent("train", attempt=9)),
    ):
        folder = node.home.attempt("run-1", number)
        folder.mkdir(mode=0o700, parents=True)
        write_json(folder / INTENT_FILE, to_wire(intent))
    assert find_newest_launched(node.home, "run-1") == 1
    assert claim_attempt(node.home, "run-1", 2, replaces=1).is_granted
    keep_all_owned(node.home)
    end_strays(node.home)
    attempt = AttemptFolder(node.home, "run-1", 1)
    assert read_status(attempt).state in ("starting", "running")
    stop(attempt, 5.0)


def test_an_attempt_of_a_master_that_took_the_run_over_counts(node: Node) -> None:
    for number in (1, 2):
        launch(node.home, signed(node.intent("finish", attempt=number), make_seed()))
        node.wait_end(AttemptFolder(node.home, "run-1", number))
    assert find_newest_launched(node.home, "run-1") == 2

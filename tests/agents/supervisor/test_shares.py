"""A server that does not answer is named as the cause, whatever its ranks have seen of that."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.run import AttemptIntent, FailureCause
from agents.contract.shares import SharedPlace
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.launch import launch
from agents.supervisor.shares import name_share
from agents.supervisor.verdict import AttemptOutcome
from tests.agents.supervisor.conftest import Node
from tests.fakes.share import can_mount, mounted_share


def use_in_place(node: Node, path: Path) -> AttemptIntent:
    place = SharedPlace(path=str(path), share="nas:/models")
    return replace(node.intent("fail"), shared=(place,))


def fail(cause: FailureCause, message: str = "It failed.") -> AttemptOutcome:
    return AttemptOutcome(state="failed", message=message, hint="Look", cause=cause)


@pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")
def test_a_share_that_stands_still_is_the_cause_and_is_not_waited_for(
    node: Node, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "config.json").write_text("{}")
    with mounted_share(served, tmp_path / "mnt") as share:
        intent = use_in_place(node, share.place)
        assert name_share(fail("stalled"), intent) == fail("stalled")
        share.freeze()
        begun_s = time.monotonic()
        found = name_share(fail("stalled"), intent, probe_s=0.5)
        assert time.monotonic() - begun_s < 5
        share.go_on()
    assert found.cause == "share_lost"
    assert found.message == (
        f"nas:/models, which node a uses in place at {share.place}, cannot be read: "
        "no answer within 0 s. It failed."
    )
    assert found.hint.startswith("Start its server, or mount the share again, then resume: ")


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (fail("error"), "share_lost"),
        (fail("crashed"), "share_lost"),
        # What has another cause for sure is left alone.
        (fail("killed"), "killed"),
        (fail("diverged"), "diverged"),
        (AttemptOutcome(state="stopped"), ""),
    ],
)
def test_files_that_are_gone_explain_what_a_rank_cannot_explain_itself(
    node: Node, tmp_path: Path, outcome: AttemptOutcome, cause: FailureCause
) -> None:
    found = name_share(outcome, use_in_place(node, tmp_path / "gone"))
    assert found.cause == cause
    assert ("No such file" in found.message) == (cause == "share_lost")


def test_a_handle_that_went_stale_is_a_loss_although_the_share_is_back(
    node: Node, tmp_path: Path
) -> None:
    stale = fail("error", "reading model.safetensors: Stale file handle")
    (tmp_path / "rows.jsonl").write_text("{}")
    assert name_share(stale, use_in_place(node, tmp_path / "rows.jsonl")).cause == "share_lost"
    assert name_share(stale, node.intent("fail")) == stale  # nothing of it is on a share


def test_an_attempt_says_which_share_it_lost(node: Node, tmp_path: Path) -> None:
    intent = use_in_place(node, tmp_path / "gone")
    launch(node.home, intent)
    ended = node.wait_end(AttemptFolder(node.home, intent.run_id, intent.attempt))
    assert (ended.state, ended.cause) == ("failed", "share_lost")
    assert "nas:/models" in ended.message
    assert "The model is not there." in ended.message

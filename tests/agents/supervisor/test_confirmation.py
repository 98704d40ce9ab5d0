"""Parts of a launch that was cut off end by themselves; confirmed ones need no master."""

from __future__ import annotations

import time
from dataclasses import replace

from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.confirmation import ConfirmationWatch, confirm
from agents.supervisor.launch import launch
from tests.agents.supervisor.conftest import Node


def launch_unconfirmed(node: Node, confirm_s: float) -> AttemptFolder:
    launch(node.home, replace(node.intent("train"), confirm_s=confirm_s))
    attempt = AttemptFolder(node.home, "run-1", 1)
    assert not node.wait_step(attempt).is_confirmed
    return attempt


def test_part_that_is_never_confirmed_ends_by_itself(node: Node) -> None:
    attempt = launch_unconfirmed(node, 1.0)
    status = node.wait_end(attempt)
    assert (status.state, status.num_processes) == ("failed", 0)
    assert status.message == (
        "Node a heard nothing from the master for 1 s during the launch, so its part of the run "
        "ended."
    )


def test_confirmed_part_needs_no_master(node: Node) -> None:
    attempt = launch_unconfirmed(node, 1.0)
    confirm(attempt, is_final=True)
    confirm(attempt, is_final=False)  # one that comes late changes nothing
    time.sleep(2.0)
    status = read_status(attempt)
    assert (status.state, status.is_confirmed) == ("running", True)


def test_each_word_of_the_master_gives_more_time(node: Node) -> None:
    attempt = AttemptFolder(node.home, "run-1", 1)
    intent = replace(node.intent("train"), confirm_s=30.0)
    attempt.folder.mkdir(parents=True)
    attempt.file("intent.json").write_text("{}")
    watch = ConfirmationWatch(attempt, intent, 100.0)
    assert watch.check(129.0) is None
    confirm(attempt, is_final=False)
    assert watch.check(131.0) is None
    confirm(attempt, is_final=False)
    assert watch.check(160.0) is None
    assert watch.check(189.0) is None
    assert watch.check(190.5) is not None


def test_a_master_that_confirms_nothing_is_not_waited_for(node: Node) -> None:
    attempt = AttemptFolder(node.home, "run-1", 1)
    assert ConfirmationWatch(attempt, node.intent("train"), 0.0).check(1e9) is None

"""A halted run: the node refuses what was sent before the stop, and no node recovers it."""

from __future__ import annotations

import shutil

import pytest

from agents.contract.requests.runs import HaltRun, RaiseFence
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.serve.handlers.runs import fence, halt
from agents.supervisor import halt as halt_module
from agents.supervisor.attempt import read_status
from agents.supervisor.fence import claim_attempt, raise_fence
from agents.supervisor.halt import halt_run
from agents.supervisor.sweep import find_processes
from tests.agents.supervisor.conftest import Node


class Call:
    def __init__(self, node: Node) -> None:
        self.home = node.home


def ask_halt(node: Node, attempt: int) -> tuple[int, ...]:
    answer = halt(Call(node), HaltRun(run_id="run-1", attempt=attempt))  # type: ignore[arg-type]
    assert to_wire(answer)["attempt"] >= attempt
    return answer.active


def test_a_launch_that_comes_after_the_stop_is_refused_and_the_next_number_is_free(
    node: Node,
) -> None:
    assert ask_halt(node, 1) == ()
    with pytest.raises(ExpectedError, match="was stopped, so node a does not start attempt 1"):
        node.launch("finish", attempt=1)
    told = fence(Call(node), RaiseFence(run_id="run-1", attempt=1))  # type: ignore[arg-type]
    assert told.halted == 1
    node.wait_end(node.launch("finish", attempt=2))


def test_a_number_that_was_granted_before_the_stop_does_not_start(node: Node) -> None:
    node.wait_end(node.launch("finish", attempt=1))
    raise_fence(node.home, "run-1", 2)  # a resume, or a recovery by the nodes, that is under way
    assert halt_run(node.home, "run-1", 1) == 2
    with pytest.raises(ExpectedError, match="was stopped"):
        node.launch("finish", attempt=2)


def test_no_node_may_recover_a_stopped_attempt_but_a_later_one(node: Node) -> None:
    node.wait_end(node.launch("finish", attempt=1))
    halt_run(node.home, "run-1", 1)
    assert not claim_attempt(node.home, "run-1", 2, replaces=1).is_granted
    node.wait_end(node.launch("finish", attempt=2))
    assert claim_attempt(node.home, "run-1", 3, replaces=2).is_granted


def test_a_running_attempt_is_named_and_may_still_save(node: Node) -> None:
    attempt = node.launch("train", attempt=1)
    node.wait_step(attempt)
    assert ask_halt(node, 1) == (1,)
    assert read_status(attempt).state == "running"


def test_processes_whose_folder_was_deleted_are_ended(node: Node) -> None:
    attempt = node.launch("train", attempt=1)
    node.wait_step(attempt)
    shutil.rmtree(node.home.runs)
    assert ask_halt(node, 1) == ()
    assert find_processes(attempt.tag) == []


def test_a_full_disk_keeps_no_attempt_from_being_named(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = node.launch("train", attempt=1)
    node.wait_step(attempt)

    def fail(*_: object) -> None:
        raise ExpectedError("The disk is full.")

    monkeypatch.setattr(halt_module, "write_bytes", fail)
    assert ask_halt(node, 1) == (1,)

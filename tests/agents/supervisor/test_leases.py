"""Work that is no run has a GPU to itself: after other such work, and never beside a run."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from agents.contract.run import AttemptIntent, RankPlacement
from agents.errors import ExpectedError
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.launch import launch
from agents.supervisor.leases import (
    BorrowedError,
    Holder,
    announce,
    borrow_device,
    find_holder,
    find_uses,
    is_any_held,
)
from agents.supervisor.stop import stop
from tests.agents.supervisor.conftest import Node

GPU = "GPU-1"


def intend(node: Node, run_id: str) -> AttemptIntent:
    place = RankPlacement(rank=0, local_rank=0, node="a", device="cuda:1", device_id=GPU)
    return replace(node.intent("train", run_id=run_id), ranks=(place,))


def never(name: str) -> bool:
    return False


def test_others_see_what_it_is_until_it_is_given_back(node: Node) -> None:
    assert find_holder(node.home, GPU) is None
    with borrow_device(node.home, GPU, "the export of run r-1", "a", never):
        assert find_holder(node.home, GPU) == Holder("the export of run r-1", None)
        assert is_any_held(node.home)
        with pytest.raises(BorrowedError) as caught:
            launch(node.home, intend(node, "r-2"))
    assert caught.value.message == ("Node a is already busy: the export of run r-1 uses GPU GPU-1.")
    assert "rackless runs stop" not in caught.value.hint
    assert find_holder(node.home, GPU) is None
    assert not is_any_held(node.home)
    assert not node.home.run("r-2").exists()
    launch(node.home, intend(node, "r-2"))
    assert find_holder(node.home, GPU) == Holder("run r-2", "r-2")
    stop(AttemptFolder(node.home, "r-2", 1), 5.0)


def test_what_fails_gives_it_back(node: Node) -> None:
    def fail() -> None:
        with borrow_device(node.home, GPU, "a measurement", "a", never):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert find_holder(node.home, GPU) is None
    with borrow_device(node.home, GPU, "a measurement", "a", never):
        pass


def test_a_run_is_not_joined_and_not_waited_for(node: Node) -> None:
    launch(node.home, intend(node, "r-1"))
    asked: list[str] = []

    def wait(name: str) -> bool:
        asked.append(name)
        return True

    refused = pytest.raises(ExpectedError, match="already busy: run r-1 uses GPU GPU-1")
    with refused, borrow_device(node.home, GPU, "the export of run r-1", "a", wait):
        pytest.fail("the run has it")
    assert asked == []
    stop(AttemptFolder(node.home, "r-1", 1), 5.0)


def test_one_waits_for_the_other_and_may_give_up(node: Node) -> None:
    waits, goes_on = threading.Event(), threading.Event()
    order: list[str] = []

    def wait(name: str) -> bool:
        order.append(f"waits for {name}")
        waits.set()
        return True

    def second() -> None:
        with borrow_device(node.home, GPU, "the second", "a", wait):
            order.append("second")
            goes_on.wait(20)

    thread = threading.Thread(target=second)
    with borrow_device(node.home, GPU, "the first", "a", never):
        thread.start()
        assert waits.wait(20)
        order.append("first")
    while find_holder(node.home, GPU) is None and thread.is_alive():
        os.sched_yield()
    with (
        pytest.raises(BorrowedError, match="the second uses GPU GPU-1"),
        borrow_device(node.home, GPU, "the third", "a", never),
    ):
        pytest.fail("the second has it")
    goes_on.set()
    thread.join(20)
    assert list(dict.fromkeys(order)) == ["waits for the first", "first", "second"]
    assert find_holder(node.home, GPU) is None


def test_a_lock_that_says_nothing_yet_is_not_taken_for_the_run_of_before(node: Node) -> None:
    launch(node.home, intend(node, "old"))
    stop(AttemptFolder(node.home, "old", 1), 5.0)
    with borrow_device(node.home, GPU, "x", "a", never):
        (node.home.leases / f"{GPU}.lock").write_text('{"run_id": "old", "attempt": 1}')
        with pytest.raises(BorrowedError, match="a run that is just starting uses"):
            launch(node.home, intend(node, "new"))


def test_work_that_shares_a_device_is_named_while_it_runs(node: Node) -> None:
    with announce(node.home, "cpu", "the merge of r-1"):
        assert find_uses(node.home, ["cpu", GPU]) == {"cpu": Holder("the merge of r-1", None)}
        with borrow_device(node.home, GPU, "the export of run r-2", "a", never):
            found = find_uses(node.home, ["cpu", GPU])
        assert found[GPU] == Holder("the export of run r-2", None)
        assert not is_any_held(node.home), "it keeps nobody else away"
    assert find_uses(node.home, ["cpu", GPU]) == {}


def test_what_a_killed_program_announced_is_forgotten(node: Node) -> None:
    child = os.fork()
    if child == 0:
        with announce(node.home, "cpu", "a chat"):
            os._exit(0)
    os.waitpid(child, 0)
    assert list(node.home.leases.glob("work-*.json"))
    assert find_uses(node.home, ["cpu"]) == {}
    assert not list(node.home.leases.glob("work-*.json"))

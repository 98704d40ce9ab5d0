"""A launch happens once, or not at all and then without a trace."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.run import AttemptIntent, AttemptStatus, RankPlacement
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.state import Home, open_home, write_json
from agents.supervisor.attempt import AttemptFolder, find_attempts, read_journal, read_status
from agents.supervisor.fence import raise_fence, read_fence
from agents.supervisor.launch import launch
from agents.supervisor.launcher import choose_interface
from agents.supervisor.stop import stop
from tests.agents.small_disk import fill, small_disk
from tests.agents.supervisor.conftest import Node, kill_supervisor


def refused(node: Node, intent: AttemptIntent) -> ExpectedError:
    """Return why the launch was refused, having checked that it left nothing behind."""

    def traces() -> list[Path]:
        return sorted([*node.home.runs.glob("*"), *node.home.runs.glob("*/attempts/*")])

    before = traces()
    with pytest.raises(ExpectedError) as caught:
        launch(node.home, intent)
    assert traces() == before
    return caught.value


def test_launch_replayed_gives_one_run(node: Node) -> None:
    attempt = node.launch("train", "train")
    first = node.wait_step(attempt)
    node.launch("train", "train")
    again = read_status(attempt)
    assert again.supervisor_pid == first.supervisor_pid
    assert again.num_processes == 3


def test_launch_replayed_after_the_end_starts_nothing(node: Node) -> None:
    attempt = node.launch("finish")
    first = node.wait_end(attempt)
    assert launch(node.home, node.intent("finish")) == first


def test_launches_at_the_same_moment_give_one_run(node: Node) -> None:
    intent = node.intent("train")
    answers: list[AttemptStatus | Exception] = []
    gate = threading.Barrier(4)

    def ask() -> None:
        gate.wait()
        try:
            answers.append(launch(node.home, intent))
        except ExpectedError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = {a.supervisor_pid for a in answers if isinstance(a, AttemptStatus)}
    assert len(answers) == 4
    assert not any(isinstance(a, Exception) for a in answers)
    assert len(pids) == 1
    attempt = find_attempts(node.home)[0]
    node.wait_step(attempt)
    launched = [
        line
        for line in read_journal(attempt.file("supervisor.jsonl"))
        if line["kind"] == "rank_started"
    ]
    assert len(launched) == 1


def test_intent_without_a_start_is_started_by_the_next_request(node: Node) -> None:
    intent = node.intent("train")
    attempt = AttemptFolder(node.home, "run-1", 1)
    attempt.folder.mkdir(parents=True)
    write_json(attempt.file("intent.json"), to_wire(intent))  # the server died right here
    (node.home.run("run-1") / "launch.lock").touch()
    assert read_status(attempt).state == "lost"
    launch(node.home, intent)
    assert node.wait_step(attempt).state == "running"


def test_busy_device_is_refused_without_a_trace(node: Node) -> None:
    attempt = node.launch("train", run_id="first")
    node.wait_step(attempt)
    error = refused(node, node.intent("train", run_id="second"))
    assert error.message == "Node a is already busy: run first uses its CPU."
    assert error.hint == "Wait for it, or stop it: rackless runs stop first --node a"
    stop(attempt, 5.0)
    node.wait_step(node.launch("train", run_id="second"))


def test_a_device_that_another_masters_run_holds_is_refused_with_its_name(node: Node) -> None:
    from agents.contract.run import MasterIdentity

    anna = MasterIdentity(host="workshop", user="anna", home="/home/anna/rackless")
    attempt = AttemptFolder(node.home, "first", 1)
    launch(node.home, replace(node.intent("train", run_id="first"), master=anna))
    assert node.wait_step(attempt).master == anna
    error = refused(node, node.intent("train", run_id="second"))
    assert error.message == "Node a is already busy: run first of anna on workshop uses its CPU."
    assert error.hint == "Wait for it, or stop it: rackless runs stop first --node a"


def test_newer_attempt_waits_for_the_older_one_to_go(node: Node) -> None:
    node.wait_step(node.launch("train", attempt=1))
    error = refused(node, node.intent("train", attempt=2))
    assert "run run-1 uses its CPU" in error.message


def test_gpus_are_leased_one_by_one(node: Node) -> None:
    def on_gpu(run_id: str, number: int) -> AttemptIntent:
        intent = node.intent("train", run_id=run_id)
        placement = RankPlacement(
            rank=0, local_rank=0, node="a", device=f"cuda:{number}", device_id=f"GPU-{number}"
        )
        return replace(intent, ranks=(placement,))

    launch(node.home, on_gpu("one", 0))
    launch(node.home, on_gpu("two", 1))
    assert "run two uses GPU GPU-1" in refused(node, on_gpu("three", 1)).message


def test_leftovers_of_a_dead_supervisor_keep_the_device(node: Node) -> None:
    attempt = node.launch("deaf", run_id="first")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    error = refused(node, node.intent("train", run_id="second"))
    assert error.message == "Node a is already busy: run first uses its CPU."
    assert error.hint == "Wait for it, or stop it: rackless runs stop first --node a"
    assert read_status(attempt).state == "running"  # with another supervisor
    stop(attempt, 0.0)
    node.wait_step(node.launch("train", run_id="second"))


def test_leftovers_of_an_older_attempt_make_way_for_the_newer(node: Node) -> None:
    first = node.launch("deaf", attempt=1)
    node.wait_step(first)
    kill_supervisor(first)
    second = node.launch("train", attempt=2)
    assert node.wait_step(second).state == "running"
    assert read_status(first).num_processes == 0


def test_older_attempt_is_refused(node: Node) -> None:
    node.wait_end(node.launch("finish", attempt=3))
    error = refused(node, node.intent("finish", attempt=2))
    assert "Attempt 2 of run run-1 is out of date: node a already knows attempt 3" in error.message


def test_fence_only_rises(node: Node) -> None:
    assert raise_fence(node.home, "run-1", 4) == 4
    assert raise_fence(node.home, "run-1", 2) == 4
    assert read_fence(node.home, "run-1") == 4
    assert "knows attempt 4" in refused(node, node.intent("finish", attempt=3)).message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": "/no/such/python"}, "Node a has no training environment at /no/such/python."),
        ({"python": "/tmp"}, "Node a has no training environment at /tmp."),
        ({"attempt": 0}, "attempts count from 1"),
        ({"node": "c"}, "No rank of run run-1 belongs to node c."),
        ({"ranks": ()}, "No rank of run run-1 belongs to node a."),
        ({"model_path": "/no/model"}, "The model is missing on node a: the copy of "),
        ({"train_path": "/no/data"}, "The training data is missing on node a: the copy of "),
        ({"resume_step": 40}, "Node a has no checkpoint of step 40"),
        ({"run_id": "../../etc"}, "The run id '../../etc' is not allowed."),
        ({"run_id": ""}, "The run id '' is not allowed."),
    ],
)
def test_what_cannot_work_is_refused_without_a_trace(
    node: Node, changes: dict[str, object], message: str
) -> None:
    intent = replace(node.intent("finish"), **changes)  # type: ignore[arg-type]
    said = refused(node, intent).message
    assert message in said
    for place in ("/no/model", "/no/data"):  # which only the node knows
        assert place not in said


def test_a_node_without_the_address_that_joins_the_nodes_is_refused_without_a_trace(
    node: Node,
) -> None:
    intent = replace(node.intent("train", elsewhere=1), address="203.0.113.7", interface=None)
    with pytest.raises(ExpectedError, match=r"No network interface .* address 203\.0\.113\.7"):
        launch(node.home, intent)
    assert not node.home.run(intent.run_id).exists()


def test_only_ranks_that_have_to_reach_another_node_listen_on_the_network(node: Node) -> None:
    alone = replace(node.intent("train", "train"), address="203.0.113.7", interface="eth7")
    joined = replace(node.intent("train", elsewhere=1), address="127.0.0.1", interface=None)
    assert (choose_interface(alone), choose_interface(joined)) == ("lo", "lo")
    named = replace(joined, address="203.0.113.7", interface="eth7")
    assert choose_interface(named) == "eth7"


def test_the_key_of_an_attempt_is_readable_for_its_user_alone(node: Node) -> None:
    intent = replace(node.intent("train"), credential="KEY")
    launch(node.home, intent)
    path = AttemptFolder(node.home, intent.run_id, 1).file("intent.json")
    assert "KEY" in path.read_text()
    assert "KEY" not in repr(intent)
    assert path.stat().st_mode & 0o077 == 0


def test_ranks_must_be_in_order(node: Node) -> None:
    intent = node.intent("finish", "finish")
    swapped = replace(intent, ranks=intent.ranks[::-1])
    assert "are not 0, 1, 2, ... in order" in refused(node, swapped).message


def test_interpreter_that_cannot_start_is_a_failure_with_a_reason(node: Node) -> None:
    node.python.write_text("#!/no/such/interpreter\n")
    status = node.wait_end(node.launch("finish"))
    assert status.state == "failed"
    assert status.message.startswith("Could not start rank 0 on node a with ")
    assert status.hint == "Build the environment again: rackless nodes setup a"


def test_disk_full_before_the_launch_leaves_nothing(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        monkeypatch.setenv("RACKLESS_AGENT_HOME", str(disk / "home"))
        small = Node(open_home(), node.python)
        fill(disk)
        error = refused(small, small.intent("finish"))
        assert "The disk is full" in error.message
        assert error.hint == "Free some space on this node and try again"


def test_disk_full_in_the_middle_still_records_the_end(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        monkeypatch.setenv("RACKLESS_AGENT_HOME", str(disk / "home"))
        small = Node(open_home(), node.python)
        attempt = small.launch("train")
        small.wait_step(attempt)
        fill(disk)
        ended = small.wait_end(attempt)
        assert ended.state == "failed"
        assert "Rank 0 on node a" in ended.message
        assert ended.num_processes == 0
        journal = attempt.file("supervisor.jsonl").read_text().splitlines()
        kinds = [kind for line in journal if (kind := json.loads(line)["kind"]) != "disk"]
        assert kinds[-2:] == ["rank_exited", "ended"], "written although the disk was full"
        assert not list(attempt.folder.glob(".reserve*")), "no reserve stays"


def test_lease_file_names_its_holder(node: Node) -> None:
    attempt = node.launch("train")
    status = node.wait_step(attempt)
    held = Home(node.home.path).leases / "cpu.lock"
    text = held.read_text()
    assert '"run_id": "run-1"' in text
    assert f'"pid": {status.supervisor_pid}' in text

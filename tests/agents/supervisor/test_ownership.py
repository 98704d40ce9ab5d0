"""A supervisor that was killed: its ranks get another one, or are ended, whoever looks first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest

from agents.contract.run_layout import SUPERVISOR_JOURNAL
from agents.errors import ExpectedError
from agents.state import agent_command, archive_path, identity_from, read_json, write_json
from agents.supervisor import ownership
from agents.supervisor import stop as stop_module
from agents.supervisor import sweep as sweep_module
from agents.supervisor.attempt import AttemptFolder, is_over, read_journal, read_status
from agents.supervisor.fence import raise_fence
from agents.supervisor.leases import find_holder
from agents.supervisor.ownership import (
    STOPPED_LOOKS,
    OwnershipWatch,
    end_strays,
    keep_all_owned,
    keep_owned,
)
from agents.supervisor.process_signs import read_process_state
from agents.supervisor.stop import stop
from agents.supervisor.sweep import find_processes
from tests.agents.supervisor.conftest import Node, kill_supervisor


def kinds(attempt: AttemptFolder) -> list[str]:
    return [line["kind"] for line in read_journal(attempt.file(SUPERVISOR_JOURNAL))]


def kill_rank(attempt: AttemptFolder, rank: int, number: int = signal.SIGKILL) -> None:
    pid = read_status(attempt).ranks[rank].pid
    assert pid is not None
    os.kill(pid, number)


def test_living_ranks_are_running_although_their_supervisor_is_gone(node: Node) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    assert read_status(attempt).state == "running"
    assert not is_over(attempt)


def test_ranks_of_a_killed_supervisor_are_adopted_and_train_on(node: Node) -> None:
    attempt = node.launch("train", "train")
    before = node.wait_step(attempt, 2)
    kill_supervisor(attempt)
    keep_owned(attempt)
    after = read_status(attempt)
    assert after.state == "running"
    assert after.supervisor_pid != before.supervisor_pid
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert after.started_s == before.started_s
    assert find_holder(node.home, "cpu") is not None  # the device is leased again
    step = after.ranks[0].step
    assert step is not None
    node.wait_step(attempt, step + 3)
    assert kinds(attempt) == ["launched", "rank_started", "rank_started", "adopted"]
    keep_owned(attempt)  # changes nothing any more
    assert read_status(attempt).supervisor_pid == after.supervisor_pid


def test_adopted_ranks_that_finish_are_done(node: Node) -> None:
    attempt = node.launch("finish", "finish", environ={"FAKE_STEP_S": "0.3"})
    node.wait_step(attempt)
    kill_supervisor(attempt)
    keep_owned(attempt)
    status = node.wait_end(attempt)
    assert (status.state, status.message) == ("done", "")
    assert [rank.exit_code for rank in status.ranks] == [0, 0]


def test_ranks_that_finished_without_a_supervisor_are_done_not_lost(node: Node) -> None:
    attempt = node.launch("finish", environ={"FAKE_STEP_S": "0.3"})
    node.wait_step(attempt)
    kill_supervisor(attempt)
    status = node.wait_end(attempt)
    assert (status.state, status.num_processes) == ("done", 0)
    assert status.ended_s is not None


def test_stop_of_adopted_ranks_lets_them_finish_their_step(node: Node) -> None:
    attempt = node.launch("train", "train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    status = stop(attempt, grace_s=10)  # nobody else has looked before
    assert (status.state, status.message, status.num_processes) == ("stopped", "", 0)
    assert [rank.exit_code for rank in status.ranks] == [0, 0]


def test_stop_at_once_of_what_a_killed_supervisor_left(node: Node) -> None:
    attempt = node.launch("daemon", "deaf")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    assert read_status(attempt).num_processes == 3  # two ranks and the grandchild live on
    status = stop(attempt, grace_s=0.0)
    assert (status.state, status.num_processes) == ("stopped", 0)
    assert find_processes(attempt.tag) == []


def test_adopted_rank_that_is_killed_is_named(node: Node) -> None:
    attempt = node.launch("train", "train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    keep_owned(attempt)
    began_s = time.monotonic()
    kill_rank(attempt, 1)
    status = node.wait_end(attempt)
    assert status.state == "failed"
    assert status.message.startswith("Rank 1 on node a (cpu) was ended in phase training")
    assert "its supervisor was replaced" in status.message
    assert status.num_processes == 0
    assert time.monotonic() - began_s < 10


def test_adopted_rank_that_hangs_is_named(node: Node) -> None:
    attempt = node.launch("train", "hang", environ={"RACKLESS_STALL_S": "1.5"})
    node.wait_step(attempt)
    kill_supervisor(attempt)
    keep_owned(attempt)
    status = node.wait_end(attempt)
    assert status.message.startswith("Rank 1 on node a (cpu) stood still for ")


def test_second_and_third_supervisor_may_die_too(node: Node) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)
    for _ in range(3):
        kill_supervisor(attempt)
        keep_owned(attempt)
    assert read_status(attempt).state == "running"
    assert kinds(attempt).count("adopted") == 3
    assert stop(attempt, 5).num_processes == 0


def test_many_who_look_at_once_make_one_supervisor(node: Node) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    code = (
        "import sys; from pathlib import Path; from agents.state import Home\n"
        "from agents.supervisor.ownership import keep_all_owned\n"
        "keep_all_owned(Home(Path(sys.argv[1])))"
    )
    environ = {**os.environ, "PYTHONPATH": archive_path()}
    command = [agent_command()[0], "-c", code, str(node.home.path)]
    lookers = [subprocess.Popen(command, env=environ) for _ in range(3)]
    assert [looker.wait(60) for looker in lookers] == [0, 0, 0]
    assert kinds(attempt).count("adopted") == 1
    assert read_status(attempt).num_processes == 2


def test_ranks_of_an_attempt_that_was_replaced_are_ended(node: Node) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    raise_fence(node.home, attempt.run_id, 2)
    keep_all_owned(node.home)
    status = node.wait_end(attempt)
    assert (status.state, status.num_processes) == ("stopped", 0)
    assert "attempt 2" in status.message


def test_supervisor_killed_before_its_last_rank_began_ends_the_others(node: Node) -> None:
    attempt = node.launch("train", "train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    started = read_json(attempt.file("started.json"))
    assert started is not None
    write_json(attempt.file("started.json"), {**started, "ranks": started["ranks"][:1]})
    keep_owned(attempt)
    status = node.wait_end(attempt)
    assert (status.state, status.num_processes) == ("failed", 0)
    assert "while it started the ranks" in status.message


def test_recorder_gives_ranks_another_supervisor_when_nobody_asks(node: Node) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)
    kill_supervisor(attempt)
    lease = node.home.telemetry / "lease"
    lease.touch()
    process = subprocess.Popen([*agent_command(), "record"], env={**os.environ})
    assert process.wait(30) == 0  # it forks; the recorder goes on
    deadline = time.monotonic() + 20
    while "adopted" not in kinds(attempt):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    recorder = identity_from(read_json(node.home.telemetry / "recorder.json"))
    assert recorder is not None
    os.kill(recorder.pid, signal.SIGTERM)
    assert read_status(attempt).state == "running"


def test_only_the_living_are_owned(node: Node) -> None:
    attempt = node.launch("finish")
    node.wait_end(attempt)
    attempt.file("exit.json").unlink()
    journal = attempt.file("rank-0.jsonl")
    journal.unlink()
    keep_all_owned(node.home)
    assert read_status(attempt).state == "lost"
    assert "adopted" not in kinds(attempt)


def test_ranks_whose_folder_was_removed_are_ended(node: Node) -> None:
    attempt, other = node.launch("hang"), AttemptFolder(node.home, "run-2", 1)
    node.wait_step(attempt)
    kill_supervisor(attempt)
    assert end_strays(node.home) == []
    assert find_processes(attempt.tag)
    twin = subprocess.Popen(  # of another agent's home
        ["sleep", "60"], env={**other.tag.environ(), "RACKLESS_ATTEMPT_DIR": "/other/runs/run-2"}
    )
    shutil.rmtree(node.home.run(attempt.run_id))
    assert [tag.text for tag in end_strays(node.home)] == ["run-1.1"]
    assert find_processes(attempt.tag) == []
    assert twin.poll() is None
    twin.kill()
    twin.wait()


def test_what_is_left_long_after_a_recorded_end_is_ended(node: Node) -> None:
    attempt = node.launch("finish")
    node.wait_end(attempt)
    left = subprocess.Popen(["sleep", "60"], env=attempt.tag.environ())
    assert end_strays(node.home) == []  # its supervisor may still be ending
    old_s = time.time() - 60
    os.utime(attempt.file("exit.json"), (old_s, old_s))
    assert [tag.text for tag in end_strays(node.home)] == ["run-1.1"]
    assert left.wait(5) == -signal.SIGKILL


def test_nothing_waits_again_for_what_no_signal_ends(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of the attempts took ten seconds each time, and so did a stop and a recovery."""
    attempt = node.launch("finish")
    node.wait_end(attempt)
    old_s = time.time() - 60
    os.utime(attempt.file("exit.json"), (old_s, old_s))
    left = subprocess.Popen(["sleep", "600"], env=attempt.tag.environ())
    monkeypatch.setattr(sweep_module, "send_signal", lambda *about: None)  # as one in the kernel
    monkeypatch.setattr(sweep_module, "SETTLE_S", 600.0)
    for module in (ownership, stop_module):
        monkeypatch.setattr(module, "LEFT_SETTLE_S", 0.0)
    try:
        assert end_strays(node.home) == []
        with pytest.raises(ExpectedError, match="cannot be killed"):
            stop(attempt, 0.0)
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize("folder", [None, "", "1", "/1", "runs/1"])
def test_a_process_that_names_no_folder_of_an_attempt_is_left_alone(
    node: Node, folder: str | None
) -> None:
    named = {} if folder is None else {b"RACKLESS_ATTEMPT_DIR": folder.encode()}
    assert end_strays(node.home, [(os.getpid(), {b"RACKLESS_TAG": b"run-1.1", **named})]) == []


def test_a_supervisor_that_was_stopped_is_continued_and_names_its_stopped_rank(node: Node) -> None:
    attempt = node.launch("train", "train")
    status = node.wait_step(attempt)
    supervisor, rank = status.supervisor_pid, status.ranks[1].pid
    assert supervisor is not None
    assert rank is not None
    for pid in (supervisor, rank):
        os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 5.0
    while read_process_state(supervisor) != "T" and time.monotonic() < end:
        time.sleep(0.01)  # where cores are busy, it does not stop at once
    watch = OwnershipWatch(node.home)
    for _ in range(STOPPED_LOOKS - 1):
        watch.look()
        assert read_process_state(supervisor) == "T", "it may be for a moment"
    watch.look()
    end = time.monotonic() + 5.0
    while "standing" not in kinds(attempt) and time.monotonic() < end:
        time.sleep(0.05)
    assert "The process was stopped (SIGSTOP)" in read_status(attempt).message
    os.kill(rank, signal.SIGCONT)

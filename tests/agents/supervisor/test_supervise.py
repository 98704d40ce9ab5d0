"""How attempts end: done, stopped, failed with the right cause named, stalled, lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from agents.contract.run import MasterIdentity
from agents.errors import ExpectedError
from agents.shared.files.logcap import (
    HEAD_BYTES,
    NEWEST_BYTES,
    SLACK_BYTES,
    read_pieces,
    used_bytes,
)
from agents.supervisor import stop as stop_module
from agents.supervisor.attempt import (
    AttemptFolder,
    find_attempts,
    read_journal,
    read_status,
    write_owner,
)
from agents.supervisor.stop import stop
from agents.supervisor.streams import list_streams, read_chunk
from agents.supervisor.supervise import UNBEGUN_GRACE_S
from agents.supervisor.sweep import find_processes
from tests.agents.supervisor.conftest import Node

LOG_LINE = "rank {rank} says line {number} of many, each as long as this one\n"
"""What the fake rank prints when it is `chatty`."""


def test_finished_ranks_are_done(node: Node) -> None:
    attempt = node.launch("finish", "finish")
    status = node.wait_end(attempt)
    assert status.state == "done"
    assert status.message == ""
    assert [rank.exit_code for rank in status.ranks] == [0, 0]
    assert [rank.step for rank in status.ranks] == [5, 5]
    kinds = [line["kind"] for line in read_journal(attempt.file("supervisor.jsonl"))]
    assert kinds == ["launched"] + 2 * ["rank_started"] + 2 * ["rank_exited"] + ["ended"]


def test_running_attempt_tells_ranks_and_processes(node: Node) -> None:
    attempt = node.launch("train", "train")
    status = node.wait_step(attempt, 2)
    assert status.state == "running"
    assert status.num_processes == 3  # the supervisor and two ranks
    assert status.spec is not None
    assert status.spec.model == "org/tiny"
    assert len(status.all_ranks) == 2
    assert all(rank.phase == "training" for rank in status.ranks)
    assert all(rank.heartbeat_age_s is not None for rank in status.ranks)
    assert all(rank.exit_code is None for rank in status.ranks)


def test_a_rank_that_prints_without_end_does_not_fill_the_disk(node: Node) -> None:
    attempt = node.launch("endless")
    node.wait_step(attempt, 3)
    journal = attempt.file("supervisor.jsonl")
    deadline = time.monotonic() + 10
    while not any(line["kind"] == "log_cut" for line in read_journal(journal)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stop(attempt, grace_s=10)
    state = attempt.file("rank-0.log").stat()
    assert state.st_size > 100 << 20
    assert used_bytes(state) <= HEAD_BYTES + NEWEST_BYTES + SLACK_BYTES
    first = LOG_LINE.format(rank=0, number=0).encode()
    pieces = dict(read_pieces(attempt.file("rank-0.log")))
    assert pieces[0].startswith(first)
    assert b"bytes of this log were dropped here" in b"".join(pieces.values())
    assert list(pieces.values())[-1].endswith(first)


def test_stop_lets_ranks_finish_their_step(node: Node) -> None:
    attempt = node.launch("train", "train")
    node.wait_step(attempt)
    status = stop(attempt, grace_s=10)
    assert status.state == "stopped"
    assert status.num_processes == 0
    assert [rank.exit_code for rank in status.ranks] == [0, 0]
    assert status.message == ""


@pytest.mark.parametrize("asked", ["supervisor", "rank"])
def test_an_end_that_only_the_system_asked_for_is_no_stop(node: Node, asked: str) -> None:
    attempt = node.launch("train")
    status = node.wait_step(attempt)
    supervisor = attempt.read_supervisor()
    assert supervisor is not None
    pid = supervisor.pid if asked == "supervisor" else status.ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)  # as systemd does when a PC shuts down
    status = node.wait_end(attempt)
    assert (status.state, status.cause) == ("failed", "killed")
    whom = "the run" if asked == "supervisor" else "rank 0"
    assert f"The system of node {status.node} asked {whom} to end (SIGTERM)" in status.message
    assert status.ranks[0].exit_code == 0
    assert "journalctl" in status.hint


def test_a_person_can_stop_a_run_on_a_full_disk(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)

    def refuse(path: object, value: object) -> None:
        raise ExpectedError("The disk is full.")

    monkeypatch.setattr(stop_module, "write_json", refuse)
    assert stop(attempt, grace_s=10).state == "stopped"


def test_stop_kills_what_does_not_listen_after_the_grace(node: Node) -> None:
    attempt = node.launch("deaf", "train")
    node.wait_step(attempt)
    began_s = time.monotonic()
    status = stop(attempt, grace_s=1.0)
    assert 1.0 <= time.monotonic() - began_s < 6.0
    assert status.state == "stopped"
    assert "Rank 0 did not finish its step within 1 s" in status.message
    assert [rank.exit_code for rank in status.ranks] == [-signal.SIGKILL, 0]
    assert status.num_processes == 0


def test_second_stop_without_time_does_not_wait_for_the_first(node: Node) -> None:
    attempt = node.launch("deaf")
    node.wait_step(attempt)
    first = threading.Thread(target=stop, args=(attempt, 60.0))
    first.start()
    node.wait(attempt, lambda status: status.state == "stopping")
    began_s = time.monotonic()
    status = stop(attempt, grace_s=0.0)
    assert time.monotonic() - began_s < 6.0
    assert (status.state, status.num_processes) == ("stopped", 0)
    assert "did not finish its step within 0 s" in status.message
    first.join(10)
    assert not first.is_alive()


def test_stop_twice_and_after_the_end_changes_nothing(node: Node) -> None:
    attempt = node.launch("finish")
    first = node.wait_end(attempt)
    assert stop(attempt, 5.0) == first
    assert stop(attempt, 5.0) == first


def test_daemonised_grandchild_is_swept(node: Node) -> None:
    attempt = node.launch("daemon")
    node.wait_step(attempt, 2)
    assert len(find_processes(attempt.tag)) == 3
    status = stop(attempt, grace_s=5)
    assert status.state == "stopped"
    assert find_processes(attempt.tag) == []


def test_stop_spares_what_lacks_our_tag(node: Node) -> None:
    bystander = os.spawnve(os.P_NOWAIT, "/bin/sleep", ["sleep", "60"], {"RACKLESS_TAG": "run-1.10"})
    twin = os.spawnve(  # the same run on another node of this PC
        os.P_NOWAIT,
        "/bin/sleep",
        ["sleep", "60"],
        {"RACKLESS_TAG": "run-1.1", "RACKLESS_ATTEMPT_DIR": "/elsewhere/runs/run-1/attempts/1"},
    )
    try:
        attempt = node.launch("train")
        node.wait_step(attempt)
        stop(attempt, grace_s=5)
        assert os.waitpid(bystander, os.WNOHANG) == (0, 0)
        assert os.waitpid(twin, os.WNOHANG) == (0, 0)
    finally:
        for pid in (bystander, twin):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_user_error_of_a_rank_becomes_the_message(node: Node) -> None:
    attempt = node.launch("fail", "train")
    status = node.wait_end(attempt)
    assert status.state == "failed"
    assert (
        status.message == "Rank 0 on node a (cpu) failed in phase loading: The model is not there."
    )
    assert status.hint == "Copy it"
    assert not status.peer_lost
    assert status.cause == "error"


def test_killed_rank_is_named_and_the_others_end(node: Node) -> None:
    attempt = node.launch("train", "killed")
    status = node.wait_end(attempt)
    assert status.state == "failed"
    # What it printed last is no cause.
    assert status.message == (
        "Rank 1 on node a (cpu) was ended by SIGKILL (not by the kernel for lack of memory: a "
        "user or another program killed it) in phase training."
    )
    assert status.num_processes == 0


def test_ranks_that_survive_a_loss_have_time_to_save(node: Node) -> None:
    # Longer than a rank gets that does not save.
    attempt = node.launch("survive 7", "killed")
    status = node.wait_end(attempt, 40.0)
    assert status.cause == "killed"
    assert [rank.exit_code for rank in status.ranks] == [3, -9]
    kinds = [line["kind"] for line in read_journal(attempt.file("rank-0.jsonl"))]
    assert kinds == ["checkpoint", "failed"]


def test_a_part_that_is_ended_since_another_node_was_lost_saves_first(node: Node) -> None:
    attempt = node.launch("survive 1", "hang")
    node.wait_step(attempt)
    status = stop(attempt, 20.0, at_loss=True)
    assert (status.state, status.num_processes) == ("stopped", 0)
    kinds = [line["kind"] for line in read_journal(attempt.file("rank-0.jsonl"))]
    assert kinds == ["checkpoint", "failed"]


def test_a_stop_of_ranks_that_hang_saves_what_survivors_hold(node: Node) -> None:
    attempt = node.launch("survive 1", "hang", environ={"RACKLESS_STALL_S": "3"})
    node.wait_step(attempt)
    status = stop(attempt, 30.0)
    assert status.state == "stopped"
    assert status.message.endswith("Step 4 was saved by a rank that waited for it.")


def test_a_person_waits_for_no_rank_that_saves_at_a_loss(node: Node) -> None:
    attempt = node.launch("survive 60", "killed")
    node.wait(attempt, lambda status: any(rank.phase == "saving" for rank in status.ranks))
    began_s = time.monotonic()
    stop(attempt, 0.0)
    assert time.monotonic() - began_s < 10.0
    assert [line["kind"] for line in read_journal(attempt.file("rank-0.jsonl"))] == []


@pytest.mark.alone
def test_exit_of_a_rank_is_seen_at_once(node: Node) -> None:
    attempt = node.launch("train")
    status = node.wait_step(attempt)
    pid = status.ranks[0].pid
    assert pid is not None
    killed_s = time.time()
    os.kill(pid, signal.SIGKILL)
    assert node.wait_end(attempt).cause == "killed"
    exits = [
        line
        for line in read_journal(attempt.file("supervisor.jsonl"))
        if line["kind"] == "rank_exited"
    ]
    assert exits[0]["time_s"] - killed_s < 0.5


def test_crash_is_blamed_before_the_lost_peer(node: Node) -> None:
    attempt = node.launch("peer_lost", "crash")
    status = node.wait_end(attempt)
    assert status.message.startswith("Rank 1 on node a (cpu) ended with exit code 1")
    assert "Its last line: ValueError: no good" in status.message
    assert not status.peer_lost
    assert status.cause == "error"


def test_lost_peer_alone_points_to_another_node(node: Node) -> None:
    attempt = node.launch("peer_lost", "train")
    status = node.wait_end(attempt)
    assert status.peer_lost
    assert status.message.endswith(
        "It lost its connection to another rank. Another node may have failed: check it first."
    )
    assert status.cause == "peer_lost"


def test_rank_that_was_left_alone_is_a_consequence(node: Node) -> None:
    status = node.wait_end(node.launch("left_alone", "train"))
    assert status.peer_lost
    assert status.message == (
        "Rank 0 on node a (cpu) failed in phase training: rank 0 (node a, cpu) lost its connection "
        "to another rank: reset. Another node may have failed: check it first."
    )


def test_rank_without_the_internet_lost_no_peer(node: Node) -> None:
    status = node.wait_end(node.launch("no_hub", "train"))
    assert not status.peer_lost
    assert status.message.endswith("failed in phase starting: Failed to connect to the hub.")


def test_stalled_rank_is_named_with_its_stack(node: Node) -> None:
    attempt = node.launch("train", "hang", environ={"RACKLESS_STALL_S": "1.5"})
    status = node.wait_end(attempt)
    assert status.state == "failed"
    assert status.message.startswith("Rank 1 on node a (cpu) stood still for ")
    assert "in phase training after step 7" in status.message
    assert b"Fatal Python error: Aborted" in attempt.file("rank-1.log").read_bytes()
    assert b"in main" in attempt.file("rank-1.log").read_bytes()


def test_stopped_process_is_the_stall(node: Node) -> None:
    attempt = node.launch("hang", "train", environ={"RACKLESS_STALL_S": "2"})
    status = node.wait_step(attempt)
    pid = status.ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    status = node.wait_end(attempt)
    assert status.cause == "stalled"
    assert status.message.startswith("Rank 1 on node a (cpu) stood still")
    assert "The process was stopped (SIGSTOP)." in status.message


def test_stopped_process_is_named_at_once_and_goes_on_when_it_is_continued(node: Node) -> None:
    attempt = node.launch("train")
    status = node.wait_step(attempt)
    pid = status.ranks[0].pid
    assert pid is not None
    stopped_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    status = node.wait(attempt, lambda status: bool(status.message))
    assert time.monotonic() - stopped_s < 3.0
    assert status.state == "running"
    assert status.message.startswith("Rank 0 on node a (cpu) has stood still for ")
    assert status.message.endswith("The process was stopped (SIGSTOP).")
    os.kill(pid, signal.SIGCONT)
    step = read_status(attempt).ranks[0].step
    assert step is not None
    node.wait_step(attempt, step + 5)
    assert node.wait(attempt, lambda status: not status.message).state == "running"


def test_rank_stopped_while_it_imports_is_named_at_once_and_ends_the_attempt(node: Node) -> None:
    attempt = node.launch("import", "load")
    status = node.wait(attempt, lambda status: [r.phase for r in status.ranks][:1] == ["starting"])
    pid = status.ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    status = node.wait(attempt, lambda status: bool(status.message))
    assert status.message.startswith("Rank 0 on node a (cpu) has stood still for ")
    assert status.message.endswith(
        "phase starting after step 0. The process was stopped (SIGSTOP)."
    )
    ended = node.wait_end(attempt, 25.0)
    assert (ended.state, ended.cause, ended.peer_lost) == ("failed", "stalled", False)
    assert ended.message.startswith("Rank 0 on node a (cpu) stood still for ")


def test_stop_continues_a_stopped_process_so_that_it_can_save(node: Node) -> None:
    attempt = node.launch("train", "train")
    status = node.wait_step(attempt)
    pid = status.ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    status = stop(attempt, grace_s=30.0)
    assert (status.state, status.message) == ("stopped", "")
    assert [rank.exit_code for rank in status.ranks] == [0, 0]


def test_stop_of_ranks_that_do_not_train_yet_waits_for_nothing(node: Node) -> None:
    attempt = node.launch("load")
    node.wait(attempt, lambda status: bool(status.ranks) and status.ranks[0].phase == "loading")
    began_s = time.monotonic()
    status = stop(attempt, grace_s=120.0)
    assert (status.state, status.num_processes) == ("stopped", 0)
    assert time.monotonic() - began_s < 15.0


def test_stop_says_nothing_of_ranks_that_its_own_signals_end(node: Node) -> None:
    attempt = node.launch("import", "load")
    begun = ["starting", "loading"]
    node.wait(attempt, lambda status: [rank.phase for rank in status.ranks] == begun)
    status = stop(attempt, grace_s=120.0)
    assert (status.state, status.message) == ("stopped", "")
    assert [rank.exit_code for rank in status.ranks] == [-signal.SIGINT, -signal.SIGKILL]
    journal = attempt.file("supervisor.jsonl").read_text().splitlines()
    ends = [line for line in map(json.loads, journal) if line["kind"] == "rank_exited"]
    assert [line for line in ends if "how" in line] == []


def test_ranks_that_load_hold_up_no_recovery(node: Node) -> None:
    attempt = node.launch("load")
    node.wait(attempt, lambda status: bool(status.ranks) and status.ranks[0].phase == "loading")
    status = stop(attempt, 20.0, at_loss=True)
    assert (status.state, status.num_processes) == ("stopped", 0)
    times = {
        line["kind"]: line["time_s"] for line in read_journal(attempt.file("supervisor.jsonl"))
    }
    assert times["rank_exited"] - times["stopping"] < UNBEGUN_GRACE_S


def test_stopped_supervisor_is_continued_to_stop_its_ranks(node: Node) -> None:
    attempt = node.launch("train")
    status = node.wait_step(attempt)
    assert status.supervisor_pid is not None
    os.kill(status.supervisor_pid, signal.SIGSTOP)
    status = stop(attempt, grace_s=20.0)
    assert (status.state, status.message) == ("stopped", "")
    assert status.ranks[0].exit_code == 0


def test_whoever_takes_an_attempt_over_is_its_master(node: Node) -> None:
    attempt = node.launch("finish")
    node.wait_end(attempt)
    assert read_status(attempt).owner is None
    other = MasterIdentity(host="laptop", user="anna", home="/home/anna/.rackless")
    write_owner(attempt, other)
    status = read_status(attempt)
    assert (status.master, status.owner) == (other, other)
    with pytest.raises(ExpectedError, match="no attempt 9"):
        write_owner(AttemptFolder(node.home, attempt.run_id, 9), other)


def test_reboot_shows_as_lost(node: Node) -> None:
    attempt = node.launch("finish")
    node.wait_end(attempt)
    attempt.file("exit.json").unlink()
    started = json.loads(attempt.file("started.json").read_text())
    started.update(pid=os.getpid(), boot_id="11111111-2222-3333-4444-555555555555")
    attempt.file("started.json").write_text(json.dumps(started))
    attempt.file("rank-0.jsonl").unlink()
    lost = read_status(attempt)
    assert lost.state == "lost"
    assert "left no record of an end" in lost.message
    # By the clock of now: the PC's own is often set only after its start.
    started_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert lost.restarted_s == pytest.approx(started_s, abs=2.0)


def test_rank_gets_the_contract_of_torchrun(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the user's own login says is not what ranks are started with.
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "True")
    attempt = node.launch("environ", "environ")
    node.wait_end(attempt)
    environ = json.loads(attempt.file("rank-1.log").read_text())
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "RACKLESS_TAG": "run-1.1",
        "RACKLESS_RUN": "run-1",
        "RACKLESS_ATTEMPT": "1",
        "RACKLESS_ATTEMPT_DIR": str(attempt.folder),
    }
    assert {name: environ.get(name) for name in expected} == expected
    assert not [name for name in environ if name.startswith("TORCHELASTIC")]
    assert int(environ["OMP_NUM_THREADS"]) >= 1


def test_log_is_complete_to_the_byte(node: Node) -> None:
    attempt = node.launch("chatty")
    node.wait_end(attempt)
    lines = [LOG_LINE.format(rank=0, number=number) for number in range(20_000)]
    assert attempt.file("rank-0.log").read_text() == "".join(lines)
    assert list_streams(attempt)["rank-0.log"] == len("".join(lines))
    assert read_chunk(attempt, "rank-0.log", 10, 5).size_bytes == len("".join(lines))


def test_attempts_are_listed(node: Node) -> None:
    for run_id, number in (("b", 1), ("a", 1), ("a", 2)):
        node.wait_end(node.launch("finish", run_id=run_id, attempt=number))
    found = [(attempt.run_id, attempt.number) for attempt in find_attempts(node.home)]
    assert found == [("a", 1), ("a", 2), ("b", 1)]


def test_fault_of_the_supervisor_ends_the_ranks_and_is_told(node: Node) -> None:
    status = node.wait_end(node.launch("train", environ={"RACKLESS_STALL_S": "soon"}))
    assert status.state == "failed"
    assert status.message.startswith("A fault in the supervisor on node a: ValueError: ")
    assert status.hint.endswith("supervisor.log")


def test_supervisor_survives_its_launcher_session(node: Node) -> None:
    attempt = node.launch("train")
    supervisor = attempt.read_supervisor()
    assert supervisor is not None
    assert os.getsid(supervisor.pid) != os.getsid(0)
    stdin = os.readlink(f"/proc/{supervisor.pid}/fd/0")
    assert stdin == "/dev/null"
    targets = {os.readlink(f"/proc/{supervisor.pid}/fd/{n}") for n in (1, 2)}
    assert targets == {str(attempt.file("supervisor.log"))}

"""Ranks whose supervisor and recorder were killed get a supervisor again, without a master."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from agents.contract.run_layout import SUPERVISOR_JOURNAL
from agents.supervisor.attempt import AttemptFolder, read_journal, read_status
from agents.supervisor.launch import launch
from agents.supervisor.stop import stop
from agents.trainer.rank import owner_watch
from agents.trainer.rank.owner_watch import OwnerWatch, watch_owner
from tests.agents.supervisor.conftest import Node, kill_supervisor, node
from tests.agents.trainer.ranks import free_port, make_rows, make_spec

__all__ = ["node"]


def num_adopted(attempt: AttemptFolder) -> int:
    lines = read_journal(attempt.file(SUPERVISOR_JOURNAL))
    return sum(line["kind"] == "adopted" for line in lines)


def test_the_second_look_in_a_row_that_finds_no_supervisor_starts_one(node: Node) -> None:
    attempt = node.launch("train")
    node.wait_step(attempt)
    watch = OwnerWatch(attempt)
    watch.look()
    kill_supervisor(attempt)
    watch.look()
    assert num_adopted(attempt) == 0, "the recorder comes first"
    watch.look()
    assert num_adopted(attempt) == 1
    watch.look()
    assert num_adopted(attempt) == 1


def test_a_rank_that_nobody_looks_after_gets_a_supervisor(node, tmp_path, tiny_model):
    make_rows(tmp_path / "train.jsonl")
    intent = replace(
        node.intent("train"),
        spec=make_spec(max_steps=100_000, batch_sequences=2),
        python=sys.executable,
        master_port=free_port(),
        model_path=str(tiny_model),
        train_path=str(tmp_path / "train.jsonl"),
        num_threads=1,
        environ={},
    )
    launch(node.home, intent)
    attempt = AttemptFolder(node.home, intent.run_id, intent.attempt)
    node.wait(attempt, lambda status: ((status.ranks and status.ranks[0].step) or 0) > 2, 90)
    kill_supervisor(attempt)
    deadline = time.monotonic() + 4 * owner_watch.PERIOD_S + 30
    while not num_adopted(attempt):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert read_status(attempt).state == "running"
    status = stop(attempt, 20)
    assert (status.state, status.num_processes) == ("stopped", 0)


def test_a_rank_that_torchrun_started_needs_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "home"))
    assert watch_owner(tmp_path / "a" / "b" / "c" / "1") is None
    assert watch_owner(Path("/x")) is None
    monkeypatch.delenv("RACKLESS_AGENT_HOME")
    assert watch_owner(tmp_path / "a" / "b" / "c" / "1") is None

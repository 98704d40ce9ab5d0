"""Ranks that wait for each other: how long, and for whom."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import torch
from torch import distributed as dist

from agents.errors import ExpectedError
from agents.trainer.rank.group import Group, PeerLost, Ranks
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.start_progress import StartProgress
from agents.trainer.rank.start_times import StartTimes
from tests.agents.trainer.rank.nccl_ranks import listening
from tests.agents.trainer.ranks import free_port

NAMES = ["rank 0 (node alpha, cpu)", "rank 1 (node beta, cpu)"]


@pytest.fixture
def groups():
    """Two ranks of one process over a store in memory."""
    store = dist.HashStore()
    made = [Group(Ranks(rank=rank, world_size=2), NAMES) for rank in range(2)]
    for group in made:
        group._store = store
    return made


def answer_late(group, after_s, tell):
    def work():
        ends_s = time.monotonic() + after_s
        while time.monotonic() < ends_s:
            tell()
            time.sleep(0.02)
        group.exchange("loaded", {"rank": 1}, timeout_s=30)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_rank_that_tells_it_is_alive_is_waited_for(groups):
    thread = answer_late(groups[1], 1.5, groups[1].signal_alive)
    found = groups[0].exchange("loaded", {"rank": 0}, timeout_s=0.5)
    assert [value["rank"] for value in found] == [0, 1]
    thread.join()


def test_a_silent_rank_is_given_up_by_name(groups):
    groups[1].signal_alive()  # once, and never again
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"timed out waiting for rank 1 \(node beta, cpu\)"):
        groups[0].exchange("loaded", {}, timeout_s=0.2)
    assert 0.3 < time.monotonic() - started_s < 10


def test_a_rank_that_waits_for_another_of_its_node_is_alive_and_says_nothing(
    tmp_path, groups, monkeypatch
):
    clock = [100.0]
    monkeypatch.setattr("agents.trainer.rank.start_progress.time.monotonic", lambda: clock[0])
    journal = RankJournal(tmp_path / "journal")
    heartbeat = Heartbeat(tmp_path / "beat")
    loading = StartProgress(journal, heartbeat, groups[1], StartTimes(tmp_path))
    for _ in range(25):
        clock[0] += 1.0
        loading.wait()
    assert groups[0]._read_sign(1) == "12"
    assert json.loads((tmp_path / "beat").read_text())["phase"] == "loading"
    heartbeat.close()
    journal.close()
    assert (tmp_path / "journal").read_text() == ""


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "for the other ranks to start"), (1, "could not reach rank 0 at")]
)
def test_a_rank_that_nobody_joins_says_whom_it_waited_for(monkeypatch, rank, words):
    monkeypatch.setattr("agents.trainer.rank.group.JOIN_TIMEOUT_S", 1.0)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**place, "RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExpectedError) as failed:
        Group(Ranks(rank=rank, world_size=2), NAMES).join("gloo", torch.device("cpu"))
    assert failed.value.message.startswith(NAMES[rank])
    assert words in failed.value.message


def test_without_a_credential_rank_0_listens_at_its_address_alone(monkeypatch):
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**place, "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("agents.trainer.rank.group.JOIN_TIMEOUT_S", 3.0)
    failed = []

    def wait_alone():
        try:
            Group(Ranks(rank=0, world_size=2), NAMES).join("gloo", torch.device("cpu"))
        except ExpectedError as error:
            failed.append(error)

    thread = threading.Thread(target=wait_alone)
    thread.start()
    seen = set()
    while thread.is_alive():
        seen |= {address for _, address, at in listening([os.getpid()]) if at == port}
        time.sleep(0.02)
    thread.join()
    assert seen == {"127.0.0.1"}
    assert failed


def test_loading_tells_people_the_supervisor_and_the_other_ranks(tmp_path, groups, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("agents.trainer.rank.start_progress.time.monotonic", lambda: clock[0])
    journal = RankJournal(tmp_path / "journal")
    heartbeat = Heartbeat(tmp_path / "beat")
    loading = StartProgress(journal, heartbeat, groups[1], StartTimes(tmp_path))
    loading.report_share("tokenizing", 1000, 0.001)  # too early for a word
    for second in range(1, 26):
        clock[0] += 1.0
        loading.report_share("tokenizing", 1000 * second, second / 100)
    assert json.loads((tmp_path / "beat").read_text())["phase"] == "tokenizing"
    assert groups[0]._read_sign(1) == "12"
    loading.end()
    heartbeat.close()
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    told = [(line["phase"], line.get("count"), line.get("share")) for line in lines]
    assert told == [
        ("tokenizing", 2000, 0.02),
        ("tokenizing", 12000, 0.12),
        ("tokenizing", 22000, 0.22),
        ("preparing", None, None),
    ]

"""Folders that an earlier version wrote are read by this one.

Recorded with commit 2cb58a4, on CPUs:

- `recorded/master` and the long run in `recorded/node` by `rackless demo --headless`: two attempts,
  the first of which lost a node; the second replayed three steps and trained to the end. Kept are
  the master's database and part of its mirrors, and the second attempt on the node alpha.
- Run `r1` in `recorded/node` by `tests/agents/trainer/ranks.py`: three steps of its tiny model with
  an adapter of rank 1, without a supervisor, and the checkpoint that it saved.

Afterwards paths and user names were replaced in all files and table columns, and the database was
copied by SQLite's backup into pages of 1 KiB. Do not record these folders again when a test here
fails: runs on users' disks would be unreadable, too.
"""

import json
import shutil
from pathlib import Path

import pytest

from agents.contract.run_layout import INTENT_FILE, rank_journal
from agents.node.checkpoints import list_checkpoints, verify
from agents.state import Home
from agents.supervisor.attempt import find_attempts, read_journal, read_status
from agents.supervisor.fence import read_fence
from agents.trainer.checkpoint.folder import read_checkpoint
from app.events import Severity
from app.paths import Paths
from app.runs.journals.history import RunHistory
from app.runs.journals.logs import find_logs
from app.storage.artifacts import ArtifactStore
from app.storage.database import open_database
from app.storage.nodes import NodeStore
from app.storage.runs import RunStore

RECORDED = Path(__file__).parent / "recorded"
RUN = "20261124-172351-3y4"


@pytest.fixture
def node() -> Home:
    return Home(RECORDED / "node")


@pytest.fixture
def master(tmp_path: Path) -> Paths:
    """A copy: opening a database may migrate it."""
    shutil.copytree(RECORDED / "master", tmp_path / "master")
    return Paths(home=tmp_path / "master")


def test_attempts_on_a_node_are_listed_with_their_end(node: Home) -> None:
    ended, lost = find_attempts(node)
    status = read_status(ended)
    assert (status.run_id, status.attempt, status.state) == (RUN, 2, "done")
    assert [(rank.rank, rank.step, rank.exit_code) for rank in status.ranks] == [(0, 48, 0)]
    assert status.spec is not None
    assert [rank.node for rank in status.all_ranks] == ["alpha", "beta"]
    assert read_fence(node, RUN) == 2
    status = read_status(lost)
    assert (status.run_id, status.attempt, status.state) == ("r1", 1, "lost")


def test_every_field_of_a_recorded_intent_is_still_known(node: Home) -> None:
    for attempt in find_attempts(node):
        intent = attempt.read_intent()
        assert intent is not None
        recorded = json.loads(attempt.file(INTENT_FILE).read_bytes())
        assert set(recorded) <= set(type(intent).__dataclass_fields__)
        assert set(recorded["spec"]) <= set(type(intent.spec).__dataclass_fields__)


def test_the_journal_of_a_rank_is_read(node: Home) -> None:
    lines = read_journal(find_attempts(node)[0].file(rank_journal(0)))
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(17, 49))


def test_a_checkpoint_is_listed_and_verified(node: Home) -> None:
    (found,) = list_checkpoints(node, "r1")
    assert (found.step, found.attempt, found.problem) == (3, 1, "")
    assert verify(node, "r1", 3).verified is True
    checkpoint = read_checkpoint(node.path / found.path)
    assert checkpoint.verify() == ""
    assert checkpoint.manifest.run_id == "r1"


def test_where_the_run_stood_is_read_from_a_checkpoint(node: Home) -> None:
    pytest.importorskip("torch")
    from agents.trainer.checkpoint.state import read_resume_point

    (found,) = list_checkpoints(node, "r1")
    point = read_resume_point(read_checkpoint(node.path / found.path))
    assert point.step == 3
    assert point.spec.adapter.rank == 1


def test_the_masters_mirror_tells_the_whole_run(master: Paths) -> None:
    history = RunHistory(RUN, master.run(RUN))
    history.refresh()
    steps = history.steps()
    assert [record.step for record in steps] == list(range(1, 49))
    assert steps[-1].loss == pytest.approx(0.172, abs=5e-3)
    certificate = history.attempt(2).certificate
    assert certificate is not None
    assert (certificate.first_step, certificate.last_step, certificate.kept) == (17, 19, True)
    assert history.newest_checkpoint() == 48
    assert [(log.attempt, log.rank, log.node) for log in find_logs(master, RUN)] == [
        (1, 0, "alpha"),
        (2, 0, "alpha"),
    ]


def test_the_masters_database_is_read(master: Paths) -> None:
    database = open_database(master.database)
    runs = RunStore(database)
    (run,) = runs.all()
    assert (run.run_id, run.state, run.attempt) == (RUN, "done", 2)
    assert run.spec.max_steps is None or run.spec.max_steps == 48
    first, second = runs.attempts(RUN)
    assert len(first.placements) == 3
    assert (len(second.placements), second.resume_step) == (2, 16)
    severities: set[Severity] = {event.severity for event in runs.events(RUN)}
    assert "error" in severities or "warning" in severities
    nodes = NodeStore(database, master.nodes_file).all()
    assert sorted(node.name for node in nodes) == ["alpha", "beta", "gamma"]
    assert len(ArtifactStore(database).all()) == 1

"""Checkpoints survive kills at any instant, a full disk, and an attempt that is out of date."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from agents.contract.mandate import checkpoint_bytes
from agents.contract.signatures import make_seed, public_key
from agents.contract.signatures import verify as public_key_verifies
from agents.errors import ExpectedError
from agents.node.checkpoints import list_checkpoints, set_aside
from agents.state import Home
from agents.trainer.checkpoint.folder import CannotWrite, CheckpointFolder, NoRoom
from agents.trainer.rank.failpoints import failpoints_from_environment
from tests.agents.small_disk import fill, small_disk
from tests.agents.trainer.checkpoint.checkpoint_writer import ABOUT, NAMES, open_folder, write_files
from tests.agents.trainer.checkpoint.writer_kills import check_newest, kill_writer, start_writer
from tests.draws import seed

FAILPOINTS = (
    "folder-made:3",
    "files-written:3",
    "file-synced:7",
    "file-synced:9",
    "manifest-written:3",
    "renamed:3",
    "committed:3",
    "hidden:2",
    "pruned:2",
)


def commit(folder, step):
    return folder.commit(step, lambda path: write_files(path, step), ABOUT)


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_a_kill_between_any_two_durable_operations_is_harmless(run, failpoint):
    writer = start_writer(run, 1, failpoint)
    assert writer.wait(30) == -signal.SIGKILL
    step = check_newest(run)
    assert step >= 2
    assert start_writer(run, 2, last_step=step + 3).wait(30) == 0
    assert check_newest(run) == step + 3
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step-{step + 2:08d}",
        f"step-{step + 3:08d}",
    ]


def kill_writers(run: Path, num_kills: int) -> None:
    """Kill writers at random instants; after each the newest checkpoint has to be whole."""
    draw = random.Random(seed(num_kills))
    newest = 0
    for attempt in range(1, num_kills + 1):
        newest = kill_writer(run, attempt, draw, newest)
    assert newest > num_kills / 4


def test_random_kills_are_harmless(run):
    kill_writers(run, 12)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_three_hundred_random_kills_are_harmless(run):
    kill_writers(run, 300)


def test_the_newest_are_kept_and_the_rest_deleted(run):
    folder = open_folder(run, 1)
    for step in (5, 10, 15, 20):
        commit(folder, step)
        folder.prune(2)
    assert [found.manifest.step for found in folder.find_all()] == [15, 20]


def test_pruning_spares_the_common_step_and_removes_what_cannot_be_read(run):
    folder = open_folder(run, 1)
    for step in (5, 10, 15, 20):
        commit(folder, step)
    (folder.path_of(10) / "manifest.json").write_text("{")
    folder.prune(3, spare_step=5)
    steps = [5, 10, 15, 20]
    assert sorted(path.name for path in folder.path.iterdir()) == [
        f"step-{step:08d}" for step in steps
    ]
    commit(folder, 25)
    folder.prune(2, spare_step=5)
    assert [found.manifest.step for found in folder.find_all()] == [5, 20, 25]
    assert not folder.path_of(10).exists()


def test_going_back_abandons_what_was_further_on_after_the_first_commit(run):
    for step in (5, 10, 15):
        commit(open_folder(run, 1), step)
    later = open_folder(run, 2)
    later.prune(3)
    assert len(later.find_all()) == 3
    commit(later, 7)
    later.prune(3)
    assert [found.manifest.step for found in later.find_all()] == [5, 7]


def test_a_step_is_written_anew_over_that_of_an_older_attempt(run):
    commit(open_folder(run, 1), 5)
    commit(open_folder(run, 2), 5)
    assert [found.manifest.attempt for found in open_folder(run, 2).find_all()] == [2]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_node_signs_what_its_ranks_write_and_copies_keep_that(run):
    seed_of_node = make_seed()
    folder = CheckpointFolder(
        run / "checkpoints",
        run_id=run.name,
        attempt=1,
        fence=run / "fence",
        failpoints=failpoints_from_environment(),
        node="alpha",
        node_seed=seed_of_node,
    )
    commit(folder, 5)
    (info,) = list_checkpoints(Home(run.parents[1]), run.name)
    message = checkpoint_bytes(run.name, 1, 5, info.manifest_sha256, "alpha")
    assert info.signer == "alpha"
    assert public_key_verifies(public_key(seed_of_node), message, info.signature)
    # Not another step, and not other files.
    other = checkpoint_bytes(run.name, 1, 6, info.manifest_sha256, "alpha")
    assert not public_key_verifies(public_key(seed_of_node), other, info.signature)
    # An earlier version's folder, with no key.
    commit(open_folder(run, 1), 6)
    assert [one.signer for one in list_checkpoints(Home(run.parents[1]), run.name)] == ["alpha", ""]


def test_what_another_nodes_copy_replaced_goes_with_the_next_save(run):
    folder = open_folder(run, 1)
    commit(folder, 5)
    set_aside(Home(run.parents[1]), run.name, 5)
    assert folder.find_all() == []
    folder.clean()
    commit(folder, 5)
    names = sorted(path.name[:6] for path in (run / "checkpoints").iterdir())
    assert names == [".aside", "step-0"]
    folder.prune(3)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]


def test_an_attempt_that_is_out_of_date_may_not_commit(run):
    folder = open_folder(run, 1)
    commit(folder, 5)
    (run / "fence").write_text("2\n")
    with pytest.raises(ExpectedError, match="Attempt 2 of run r1 has begun") as caught:
        commit(folder, 10)
    assert not isinstance(caught.value, CannotWrite)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]
    commit(open_folder(run, 2), 10)


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        run = disk / "runs" / "r1"
        folder = open_folder(run, 1)
        commit(folder, 1)
        fill(disk, leave_bytes=30_000)
        with pytest.raises(NoRoom, match="disk is full"):
            commit(folder, 2)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
        assert check_newest(run) == 1


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_found(run, name):
    checkpoint = commit(open_folder(run, 1), 5)
    path = checkpoint.path / name
    data = bytearray(path.read_bytes())
    data[777] ^= 1
    path.write_bytes(data)
    assert checkpoint.verify() == f"{name} is not what was written"
    path.unlink()
    assert name in checkpoint.verify()

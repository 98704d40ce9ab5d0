"""A model and data on a share: two loopback nodes use them in place, and both may be lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.share import FakeShare, can_mount, mounted_share
from tests.fakes.site import DEMO, Site, open_site, tagged_processes, wait_until

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse"),
]
NODES = ("alpha", "beta")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("shared"), NODES) as opened:
        yield opened


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    shutil.copytree(DEMO / "model", folder / "model")
    shutil.copy(DEMO / "train.jsonl", folder)
    return folder


@pytest.fixture
def share(served: Path, tmp_path: Path) -> Iterator[FakeShare]:
    with mounted_share(served, tmp_path / "mnt") as made:
        yield made


def test_what_is_on_a_share_is_trained_in_place_and_refused_once_it_has_changed(
    site: Site, share: FakeShare, served: Path
) -> None:
    data = {"train": str(share.place / "train.jsonl"), "format": "chat"}
    run_file = site.write_run_file(500, model=str(share.place / "model"), data=data)
    plan = site.rackless("plan", str(run_file))
    assert "nodes that have nas:/models/model use it in place" in plan.output
    started = site.rackless("start", str(run_file))
    assert started.code == 0, started.problem
    assert "the model: used in place from nas:/models/model on alpha and beta" in started.problem
    run_id = started.output.split()[0]
    for rank, name in enumerate(NODES):
        intent = json.loads((site.attempt(name, run_id) / "intent.json").read_bytes())
        assert intent["model_path"] == str(share.place / "model")
        assert intent["train_path"] == str(share.place / "train.jsonl")
        wait_until(partial(site.steps_told, name, run_id, rank), "a step", 300.0)
        assert not list((site.agent_home(name) / "store").glob("files/*/*"))
        assert not list((site.agent_home(name) / "models").glob("*"))
    site.answer("runs", "stop", run_id)

    # The data changes on the server, and then that stands still.
    rows = (served / "train.jsonl").read_bytes()
    (served / "train.jsonl").write_bytes(rows.splitlines(keepends=True)[0] + rows)
    refused = site.rackless("runs", "resume", run_id)
    assert refused.code == 1
    assert "train.jsonl has changed since the run started" in refused.problem
    share.freeze()
    refused = site.rackless("runs", "resume", run_id)
    share.go_on()
    assert refused.code == 1
    assert "nas:/models/model does not answer" in refused.problem
    assert tagged_processes(run_id) == []

"""What lies on a share is recognised on this PC, and said before a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.shares import parse_mounts
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.library import shares
from app.library.data import find_data
from app.library.models import find_model
from app.library.sent_files import list_sent, say_sent
from app.library.shares import ask_for, find_silent, locate, require_answer
from app.runs.services import Services
from tests.fakes.share import can_mount, mounted_share


@pytest.fixture
def nas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's folder, which the mounts of this PC name as one of a server."""
    text = f"""22 1 259:2 / / rw - ext4 /dev/sda1 rw
71 22 0:52 / {tmp_path} rw - nfs4 nas:/volume1 rw,vers=4.2"""
    monkeypatch.setattr(shares, "read_mounts", lambda: parse_mounts(text))
    return tmp_path


def test_nodes_are_asked_for_the_same_path_and_for_the_folder_of_the_server(
    nas: Path, spec: RunSpec, services: Services
) -> None:
    (nas / "link").symlink_to(nas / "model")
    query = ask_for(find_model(str(nas / "link"), services.hashes))
    assert query is not None
    assert query.is_model
    assert query.paths == (str(nas / "link"), str(nas / "model"))
    assert query.share is not None
    assert query.share.label == "nas:/volume1/model"
    assert query.member is None
    data = ask_for(find_data(spec.data.train, "data.train", services.hashes))
    assert data is not None
    assert (data.is_model, data.paths, data.member) == (False, (str(nas),), "chats.jsonl")


def test_what_is_changed_on_its_way_is_always_copied(spec: RunSpec, services: Services) -> None:
    source = find_model(spec.model, services.hashes)
    assert ask_for(source) is not None
    assert ask_for(replace(source, cleaned=("config.json",))) is None
    assert ask_for(replace(source, destination=None)) is None  # a hub id


def test_a_disk_of_this_pc_is_no_share(tmp_path: Path) -> None:
    assert locate(tmp_path) is None


def test_what_is_on_a_share_is_said_before_it_is_sent(nas: Path, spec: RunSpec) -> None:
    data, model = list_sent(spec)
    assert data.share == "nas:/volume1/chats.jsonl"
    assert say_sent(model).endswith("; nodes that have nas:/volume1/model use it in place")


@pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")
def test_a_server_that_does_not_answer_is_named_instead_of_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "rows.jsonl").write_text("{}")
    monkeypatch.setattr(shares, "ANSWER_S", 2.0)
    with mounted_share(tmp_path / "served", tmp_path / "mnt") as share:
        rows = share.place / "rows.jsonl"
        require_answer(["org/model", str(rows), str(share.place / "gone")])
        assert find_silent(tmp_path / "served", 2.0) is None
        share.freeze()
        with pytest.raises(UserError) as refused:
            require_answer(["org/model", str(rows)])
        share.go_on()
    assert refused.value.message.startswith("nas:/models/rows.jsonl does not answer: ")
    assert refused.value.topic == "share-lost"

"""Pushing to a hub with the user's own token, by huggingface_hub itself, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from agents.contract.requests.exports import Origin
from app.artifact import ArtifactSnapshot
from app.artifacts.copies import push_artifact
from app.artifacts.deletion import delete_artifact
from app.artifacts.record import find_artifact, look_at_folders, record_export
from app.artifacts.verification import check_artifact
from app.errors import UsageError, UserError
from app.runs.services import Services
from tests.fakes.artifacts import make_folder
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.hub import TOKEN, FakeHub, open_hub

ORIGIN = Origin(base="org/base", data="/home/a/x.jsonl", run_id="r-1", run_name="poems", step=40)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make_services(tmp_path / "home", FakeCluster())


@pytest.fixture
def made(services: Services, tmp_path: Path) -> ArtifactSnapshot:
    folder = make_folder(tmp_path / "out", ORIGIN, "awq")
    return record_export(services, folder, "awq", (), ORIGIN)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with open_hub() as opened:
        monkeypatch.setattr(constants, "ENDPOINT", opened.address)
        yield opened


def push(services: Services, made: ArtifactSnapshot, to: str = "anna/poems") -> None:
    asyncio.run(push_artifact(services, made, to, True, lambda text: None))


def test_a_push_is_private_and_leaves_the_proof_here(
    services: Services, made: ArtifactSnapshot, hub: FakeHub
) -> None:
    push(services, made)
    assert set(hub.models["anna/poems"]) == {"README.md", "config.json", "model.safetensors"}
    assert hub.private == {"anna/poems": True}
    copy = find_artifact(services, made.label).copies[-1]
    assert (copy.kind, copy.place) == ("hub", "anna/poems")
    assert copy.path == f"{hub.address}/anna/poems"


def test_an_artifact_goes_without_the_places_of_this_pc(
    services: Services, tmp_path: Path, hub: FakeHub
) -> None:
    origin = replace(ORIGIN, base="/home/a/models/llama")
    folder = make_folder(tmp_path / "merged", origin, "merged")
    adapter = folder / "adapter" / "adapter_config.json"
    adapter.parent.mkdir()
    adapter.write_text(json.dumps({"base_model_name_or_path": origin.base, "r": 4}, indent=2))
    made = record_export(services, folder, "merged", (), origin)
    push(services, made, "anna/merged")
    card = hub.models["anna/merged"]["README.md"].decode()
    assert "`llama`" in card
    assert "`x.jsonl`" in card
    assert "/home" not in card
    sent = json.loads(hub.models["anna/merged"]["adapter/adapter_config.json"])
    assert sent == {"base_model_name_or_path": "llama", "r": 4}
    assert "/home/a/models/llama" in (folder / "README.md").read_text()
    found = find_artifact(services, made.label)
    asyncio.run(check_artifact(services, found, lambda text: None))
    assert [one.state for one in find_artifact(services, made.label).copies] == ["whole", "whole"]


def test_copies_on_the_hub_are_checked_and_stay_when_the_rest_is_deleted(
    services: Services, made: ArtifactSnapshot, hub: FakeHub
) -> None:
    push(services, made)
    found = find_artifact(services, made.label)
    asyncio.run(check_artifact(services, found, lambda text: None))
    assert [one.state for one in find_artifact(services, made.label).copies] == ["whole", "whole"]
    del hub.models["anna/poems"]["model.safetensors"]
    (_, on_hub) = asyncio.run(check_artifact(services, found, lambda text: None))
    assert (on_hub.state, on_hub.problem) == ("damaged", "model.safetensors missing")
    done = asyncio.run(delete_artifact(services, found, None, True))
    assert "stays on the hub" in done.left[0]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "no longer accepts this PC's token"),
        (403, "may not write"),
        (500, "refused anna/poems"),
    ],
)
def test_what_the_hub_refuses_is_told_without_the_token(
    services: Services, made: ArtifactSnapshot, hub: FakeHub, status: int, message: str
) -> None:
    hub.status = status
    with pytest.raises(UserError, match=message) as caught:
        push(services, made)
    assert TOKEN not in caught.value.message + caught.value.hint
    assert caught.value.__cause__ is None
    assert len(find_artifact(services, made.label).copies) == 1


def test_no_token_no_network_and_no_id_are_told(
    services: Services,
    made: ArtifactSnapshot,
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="poems is no id"):
        push(services, made, "poems")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="the hub cannot be reached"):
        push(services, made)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be reached: .*offline mode"):
        push(services, made)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UserError, match="there is no token of the hub"):
        push(services, made)


def test_only_what_is_on_this_pc_is_pushed(
    services: Services, made: ArtifactSnapshot, hub: FakeHub, tmp_path: Path
) -> None:
    (tmp_path / "out").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="cannot be read from anywhere"):
        push(services, look_at_folders(made))

"""Configs come from the folder, from what ships, or from the hub, and never twice from there."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Mapping
from email.message import Message
from pathlib import Path

import pytest

from app.errors import UserError
from app.library.configs import ConfigLibrary, read_known
from app.planning.shape.model_shape import read_shape


class Hub:
    """Answers like the hub, and counts."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, str]]] = []

    def __call__(self, address: str, headers: Mapping[str, str]) -> bytes:
        self.asked.append((address, dict(headers)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def library(tmp_path: Path, hub: Hub, **environ: str) -> ConfigLibrary:
    return ConfigLibrary(tmp_path / "configs", {"HF_HOME": str(tmp_path / "hf"), **environ}, hub)


@pytest.mark.parametrize("entry", read_known(), ids=lambda entry: entry["names"][0])
def test_models_that_ship_have_the_published_number_of_parameters(entry: dict) -> None:
    assert read_shape(entry["config"]).num_parameters == entry["parameters"]


def test_folder_comes_first_then_what_ships(tmp_path: Path) -> None:
    hub = Hub(b"")
    found = library(tmp_path, hub).find_here("meta-llama/llama-2-7b-hf")
    assert found is not None
    assert (found.config["hidden_size"], found.source) == (4096, "from Rackless's own table")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    found = library(tmp_path, hub).find_here(str(tmp_path))
    assert found is not None
    assert (found.config, found.source) == ({"hidden_size": 8}, "")
    assert library(tmp_path, hub).find_here("org/other") is None
    assert not hub.asked


def test_hub_is_asked_once_and_remembered(tmp_path: Path) -> None:
    hub = Hub(json.dumps({"hidden_size": 8}).encode())
    environ = {"HF_ENDPOINT": "https://mirror/", "HF_TOKEN": "secret"}
    assert library(tmp_path, hub, **environ).fetch("org/new").source == "from the hub"
    assert hub.asked == [
        ("https://mirror/org/new/resolve/main/config.json", {"Authorization": "Bearer secret"})
    ]
    (tmp_path / "token").write_text("hf_kept\n")
    library(tmp_path, hub, HF_TOKEN_PATH=str(tmp_path / "token")).fetch("org/newer")
    assert hub.asked[-1][1] == {"Authorization": "Bearer hf_kept"}, "as the hub's tools keep it"
    again = library(tmp_path, hub).find_here("org/new")
    assert again is not None
    assert (again.config, again.source) == ({"hidden_size": 8}, "fetched before")


def test_hub_that_refuses_is_not_asked_at_each_key(tmp_path: Path) -> None:
    hub = Hub(urllib.error.HTTPError("https://x", 401, "no", Message(), None))
    shelf = library(tmp_path, hub)
    for _ in range(3):
        with pytest.raises(UserError, match="behind a licence"):
            shelf.fetch("org/gated")
    assert len(hub.asked) == 1
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        library(tmp_path, hub, HF_HUB_OFFLINE="1").fetch("org/other")
    with pytest.raises(UserError, match="it is not a hub id"):
        shelf.fetch("./nowhere")
    assert len(hub.asked) == 1


def test_config_that_is_no_json_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be fetched"):
        library(tmp_path, Hub(b"<html>")).fetch("org/page")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        library(tmp_path, Hub(b"")).find_here(str(tmp_path))

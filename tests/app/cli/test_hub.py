"""Models and data sets of the hub as commands: find, fetch, list, here and on nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.contract.requests.hub import CachedRepo, ListCached
from agents.node.hub_snapshots import list_cached
from agents.state import Home
from app.cli.main import run
from tests.app.runs.inputs.test_hub_models import FILES, REVISION, fill_cache
from tests.fakes.model_site import ModelSite, model_site
from tests.fakes.ssh import nodes

TOKEN = "hf_" + "t" * 34


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSite]:
    """Serve a gated and an open model; this PC has the token, no node, and an empty cache."""
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with model_site("org/gated", FILES, (TOKEN,)) as site:
        site.add("org/tiny", files=FILES, about={"tags": ["license:mit"], "likes": 3})
        site.add("org/rows", kind="dataset", files={"train.jsonl": b'{"text": "a"}\n'})
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        yield site


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_are_found_fetched_and_listed(
    site: ModelSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "models", "find", "org")
    assert [one["name"] for one in found["items"]] == ["org/gated", "org/tiny"]
    assert [one["is_gated"] for one in found["items"]] == [True, False]
    assert found["items"][1]["licence"] == "mit"
    assert found["items"][1]["fit"]["verdict"] == "unknown"
    assert found["items"][1]["fit"]["text"] == "There is no node yet"
    fetched = answer(capsys, "models", "fetch", "org/tiny")
    folder = Path(fetched["folder"])
    assert folder == tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / REVISION
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    (here,) = answer(capsys, "models", "list")
    assert here["pc"] == ""
    assert [(one["name"], one["is_whole"]) for one in here["repos"]] == [("org/tiny", True)]
    assert run(["models", "find", "tiny", "--no-fit"]) == 0
    assert "org/tiny" in (shown := capsys.readouterr().out)
    assert "yes" in shown
    assert run(["models", "list"]) == 0
    assert "this PC" in capsys.readouterr().out


def test_data_sets_are_found_fetched_and_listed(
    site: ModelSite, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "data", "find")
    assert [one["name"] for one in found["items"]] == ["org/rows"]
    fetched = answer(capsys, "data", "fetch", "org/rows")
    assert (Path(fetched["folder"]) / "train.jsonl").read_bytes() == b'{"text": "a"}\n'
    (here,) = answer(capsys, "data", "list")
    assert [(one["name"], one["kind"]) for one in here["repos"]] == [("org/rows", "data")]
    assert answer(capsys, "models", "list")[0]["repos"] == []


@pytest.mark.parametrize(
    ("argv", "code", "message", "hint"),
    [
        (["models", "fetch", "../x"], 2, "is not the id of a model", "such as org/name"),
        (["data", "fetch", "org/rows:../x"], 2, "is not the id of a data set", "such as"),
        (["models", "fetch", "org/tiny", "--revision", "../x"], 2, "not a branch", "such as"),
        (["models", "fetch", "org/none"], 1, "it is missing or private", "Check the spelling"),
        (["models", "fetch", "org/tiny", "--revision", "v9"], 1, "no such revision", "branches"),
        (["models", "fetch", "org/tiny", "--node", "pc-9"], 1, "pc-9", ""),
        (["models", "find", "--limit", "0"], 2, "is not a number from 1 to 200", ""),
    ],
)
def test_what_cannot_be_fetched_is_said(
    site: ModelSite,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    code: int,
    message: str,
    hint: str,
) -> None:
    assert run(argv) in (code, 2)
    said = capsys.readouterr().err
    assert message in said
    assert hint in said


def test_a_gated_model_without_a_token_says_where_to_ask(
    site: ModelSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert run(["models", "fetch", "org/gated"]) == 1
    said = capsys.readouterr().err
    assert "behind a licence on the hub that this PC's account has not accepted" in said
    assert "Accept it at https://huggingface.co/org/gated, then give this PC your token" in said


def test_offline_the_cache_is_listed(
    site: ModelSite,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_cache(tmp_path / "hf" / "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = answer(capsys, "models", "find", "--no-fit")
    assert [one["name"] for one in found["items"]] == ["org/tiny"]
    assert found["problem"].startswith("HF_HUB_OFFLINE")
    assert site.asked == []


async def test_a_node_lists_its_cache_and_its_own_copies(tmp_path: Path) -> None:
    fill_cache(tmp_path / "pc-0" / ".cache" / "huggingface" / "hub")
    async with nodes(tmp_path, 1) as (one,):
        (repo,) = (await one.ask(ListCached())).repos
    size_bytes = sum(len(data) for data in FILES.values())
    assert repo == CachedRepo(
        kind="model", name="org/tiny", size_bytes=size_bytes, revisions=(REVISION,)
    )


def test_odd_folders_in_a_cache_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    assert list_cached(Home(tmp_path)).repos == ()
    fill_cache(cache)
    (cache / "models--org--half" / "blobs").mkdir(parents=True)
    (cache / "models--org--half" / "blobs" / f"{'a' * 64}.incomplete").write_bytes(b"12345")
    for name in ("models--\x1b[2J", "models--a--b--c", "models--empty", "spaces--org--x"):
        (cache / name / "blobs").mkdir(parents=True)
    (cache / "models--file").write_text("")
    (cache / "models--org--odd" / "blobs").mkdir(parents=True)
    (cache / "models--org--odd" / "snapshots" / "\x1b[2J").mkdir(parents=True)
    found = list_cached(Home(tmp_path)).repos
    assert [(one.name, one.size_bytes, one.is_whole) for one in found] == [
        ("org/half", 5, False),
        ("org/tiny", sum(len(data) for data in FILES.values()), True),
    ]

"""Layers that a broken-off job has done: whose they are, when they stay and when they go."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.node.files import remove_layers
from agents.quantizers.formats.by_gptqmodel import count_kept, keeping, name_layers
from agents.quantizers.job.reuse import LINEAGE_FILE, make_room
from tests.agents.quantizers.test_make import job_for

VERSION = "7.6.0"
ROWS = [[1, 2, 3]]


class CheckpointStopped(Exception):
    """As gptqmodel tells that it has stopped behind a layer."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What gptqmodel is told."""

    path: Path
    interval: str


@pytest.fixture(autouse=True)
def gptqmodel(stand_in: Callable[[dict[str, dict[str, Any]]], None]) -> None:
    """The names that are taken from gptqmodel."""
    stand_in(
        {
            "gptqmodel": {"CheckpointConfig": CheckpointConfig},
            "gptqmodel.looper.checkpoint": {"CheckpointStopped": CheckpointStopped},
        }
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A merged Llama, as far as its layers ask."""
    found = tmp_path / "exports" / "merged-4"
    found.mkdir(parents=True)
    (found / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (found / LINEAGE_FILE).write_text(json.dumps({"content": "ab" * 32}))
    return found


def place_of(
    model: Path, method: str = "awq", group: int = 128, rows: list[list[int]] = ROWS
) -> Path | None:
    job = job_for(model.parent, method, *(("4-bit",) if method == "gptq" else ()))
    return name_layers(model, job, group, rows, VERSION)


def stop_within(place: Path, attempt: str) -> None:
    def work() -> None:
        with keeping(place, 32):
            (place / attempt).mkdir()
            raise CheckpointStopped

    with pytest.raises(CheckpointStopped):
        work()


def test_layers_are_known_by_all_that_decides_them(model):
    first = place_of(model)
    assert first is not None
    assert first == place_of(model)
    assert first.name.startswith(".layers-merged-4-")
    assert first not in (place_of(model, "gptq"), place_of(model, group=64))
    assert first != place_of(model, rows=[[1, 2], [3]]), "the same text, not in one block"
    (model / LINEAGE_FILE).write_text(json.dumps({"content": "cd" * 32}))
    assert place_of(model) != first
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    assert place_of(model) is None, "gptqmodel goes on with Llamas"
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / LINEAGE_FILE).unlink()
    assert place_of(model) is None, "nobody knows what it is"


def test_they_go_with_a_success_and_with_a_failure_and_stay_when_the_pc_shuts_down(model):
    place = place_of(model)
    assert place is not None
    with keeping(place, 32) as more:
        assert more["checkpoint"] == CheckpointConfig(path=place, interval="layer:4")
        (place / "attempt-1").mkdir()
    assert not place.exists()
    with pytest.raises(OSError, match="full"), keeping(place, 32):
        raise OSError("full")
    assert not place.exists()
    stop_within(place, "attempt-2")
    assert [path.name for path in place.iterdir()] == ["attempt-2"]
    stop_within(place, "attempt-3")
    assert [path.name for path in place.iterdir()] == ["attempt-3"]


def test_of_two_jobs_one_keeps_them_and_a_cancel_leaves_those_of_others(model):
    place = place_of(model)
    assert place is not None
    left = model.with_name(".layers-merged-4-old")
    left.mkdir()
    with keeping(place, 2), keeping(place, 2) as second:
        assert second == {}
        remove_layers(model.parent / "awq-4")
        assert place.exists()
        assert not left.exists()
    with keeping(None, 2) as nowhere:
        assert nowhere == {}


def test_they_are_counted_and_go_with_the_merged_model(model):
    place = place_of(model)
    assert place is not None
    assert count_kept(place) == 0
    (place / "objects").mkdir(parents=True)
    (place / "CURRENT").write_text(json.dumps({"generations": ["ab", "cd"]}))
    (place / "objects" / "ab").write_text(json.dumps({"cursor": 12}))
    assert count_kept(place) == 12
    make_room(model.with_name("merged-8"))
    assert not list(model.parent.iterdir())

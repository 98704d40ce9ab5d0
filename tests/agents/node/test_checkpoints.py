"""What a node says about its checkpoints, whole or damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from agents.errors import ExpectedError
from agents.node.checkpoints import delete, list_checkpoints, verify
from agents.node.manifest import read_manifest, write_manifest
from agents.state import Home


def make(home: Home, run_id: str = "run-1", step: int = 100, **changes: Any) -> Path:
    """Write a checkpoint as the trainer does, its files in an order of the caller's."""
    folder = home.checkpoints(run_id) / f"step-{step:08d}"
    folder.mkdir(parents=True)
    files = {"state.json": b'{"step":100}', "adapter_model.safetensors": b"\x00" * 1000}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    entries = [
        {"path": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    ]
    manifest = {"run_id": run_id, "attempt": 2, "step": step, "created_s": 5.5, "files": entries}
    write_manifest(folder, {**manifest, **changes})
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_whole_checkpoint(home: Home) -> None:
    make(home)
    (found,) = list_checkpoints(home, "run-1")
    assert (found.run_id, found.step, found.attempt) == ("run-1", 100, 2)
    assert found.path == "runs/run-1/checkpoints/step-00000100"
    assert found.size_bytes == 1012
    assert found.created_s == 5.5
    assert found.verified is None
    verified = verify(home, "run-1", 100)
    assert verified.verified is True
    assert verified.manifest_sha256 == found.manifest_sha256


def test_copies_compare_equal_whatever_else_their_manifests_say(home: Home, tmp_path: Path) -> None:
    folder = make(home)
    manifest = json.loads((folder / "manifest.json").read_text())
    other = Home(tmp_path / "other")
    make(other, created_s=9.0, files=manifest["files"][::-1])
    first, second = (list_checkpoints(h)[0].manifest_sha256 for h in (home, other))
    assert first == second
    manifest["files"][0]["sha256"] = "0" * 64
    make(other, step=200, files=manifest["files"])
    assert list_checkpoints(other)[1].manifest_sha256 != first


def test_list_is_sorted_and_ignores_what_is_no_checkpoint(home: Home) -> None:
    for run_id, step in (("b", 1), ("a", 20), ("a", 3)):
        make(home, run_id, step)
    for name in (".tmp-step-00000004", "step-4", "step-00000005.tmp", ".partial-step-00000006"):
        (home.checkpoints("a") / name).mkdir()
    (home.checkpoints("a") / "step-00000007").write_text("a file")
    assert [(c.run_id, c.step) for c in list_checkpoints(home)] == [("a", 3), ("a", 20), ("b", 1)]
    assert list_checkpoints(home, "none") == []


def test_any_changed_byte_of_the_manifest_is_damage(home: Home) -> None:
    """A changed hash of the training data once passed, and a resume then blamed the data."""
    folder = make(home, data_sha256="d" * 64)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = verify(home, "run-1", 100)
        assert found.verified is False, whole[place - 20 : place + 20]
        assert found.problem.startswith("manifest.json cannot be used: ")
    path.write_bytes(whole)
    assert verify(home, "run-1", 100).verified


def test_manifest_of_an_earlier_version_has_no_hash_of_its_own(home: Home) -> None:
    folder = make(home)
    fields = read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(fields))
    assert verify(home, "run-1", 100).verified
    (folder / "manifest.json").write_text(json.dumps({**fields, "sha256": "0" * 64}, indent=1))
    assert verify(home, "run-1", 100).problem.endswith("it is not what was written")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}', '{"files": [{"path": 1}]}'])
def test_unusable_manifest_is_a_problem_not_a_crash(home: Home, text: str) -> None:
    folder = make(home)
    (folder / "manifest.json").write_text(text)
    (found,) = list_checkpoints(home)
    assert found.size_bytes == 1012 + len(text)
    assert found.created_s == folder.stat().st_mtime, "not 1970"
    assert found.problem.startswith("manifest.json cannot be used: ")
    assert found.verified is False
    assert found.manifest_sha256 == ""
    assert verify(home, "run-1", 100).problem == found.problem


@pytest.mark.parametrize("attempt", [None, "2", 0])
def test_manifest_that_tells_no_attempt_cannot_be_used(home: Home, attempt: Any) -> None:
    make(home, attempt=attempt)
    (found,) = list_checkpoints(home)
    assert found.problem == "manifest.json cannot be used: it names no attempt"
    assert verify(home, "run-1", 100).verified is False


@pytest.mark.parametrize("name", ["state.json", "adapter_model.safetensors"])
def test_damage_is_found(home: Home, name: str) -> None:
    path = make(home) / name
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))
    assert verify(home, "run-1", 100).problem.startswith(f"{name} is damaged")
    path.write_bytes(bytes(data[:-1]))
    assert f"{name} has {len(data) - 1} bytes instead of {len(data)}" in (
        verify(home, "run-1", 100).problem
    )
    path.unlink()
    found = verify(home, "run-1", 100)
    assert found.verified is False
    assert name in found.problem


def test_manifest_cannot_point_outside(home: Home) -> None:
    make(home, files=[{"path": "../../x", "size_bytes": 1, "sha256": "0" * 64}])
    assert "is not allowed" in verify(home, "run-1", 100).problem


def test_delete(home: Home) -> None:
    folder = make(home)
    make(home, step=200)
    delete(home, "run-1", 100)
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000200"]
    with pytest.raises(ExpectedError, match="has no checkpoint of run run-1 at step 100"):
        delete(home, "run-1", 100)
    with pytest.raises(ExpectedError, match="is not allowed"):
        verify(home, "../x", 100)

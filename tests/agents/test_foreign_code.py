"""The guard against code of models, in a program of its own: which ways of an import it covers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib.util, sys, zipimport
from agents import foreign_code
foreign_code.install()
folder, way, place = sys.argv[1:]
foreign_code.forbid(folder)
def by_path():
    sys.path.insert(0, place)
    importlib.import_module("planted")
def by_loader():
    zipimport.zipimporter(place).load_module("planted")
def by_spec():
    spec = zipimport.zipimporter(place).find_spec("planted")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
try:
    {"path": by_path, "loader": by_loader, "spec": by_spec}[way]()
    print("ran")
except foreign_code.ForeignCodeRefused as error:
    print(error.message)
"""


def run(folder: Path, way: str, place: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), way, str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr


def plant_archive(path: Path, canary: Path, inside: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{inside}planted.py", f"open({json.dumps(str(canary))}, 'w')")
    return path


@pytest.mark.parametrize("name", ["packed.zip", "model.whl", "tokenizer.egg"])
@pytest.mark.parametrize("way", ["path", "spec", "loader"])
def test_an_archive_in_a_models_folder_runs_nothing(tmp_path: Path, name: str, way: str) -> None:
    canary = tmp_path / "canary"
    place = plant_archive(tmp_path / "model" / name, canary)
    said = run(tmp_path / "model", way, place)
    assert not canary.exists(), said
    assert "wants to run code of its own" in said
    assert name in said


def test_neither_a_folder_of_an_archive_nor_a_link_to_one_is_a_way_round(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    place = plant_archive(tmp_path / "model" / "packed.zip", canary, "deep/")
    (tmp_path / "link.zip").symlink_to(place)
    for spelled in (place / "deep", tmp_path / "link.zip" / "deep"):
        assert "wants to run code of its own" in run(tmp_path / "model", "path", spelled)
    assert not canary.exists()


def test_an_archive_elsewhere_is_imported(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    place = plant_archive(tmp_path / "tools" / "packed.zip", canary)
    assert run(tmp_path / "model", "path", place) == "ran"
    assert canary.exists()

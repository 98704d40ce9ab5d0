"""A model is downloaded for all nodes of a run, with its share told, where there is room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import huggingface_hub
import pytest

from agents.errors import ExpectedError
from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source
from agents.trainer.data import hub_fetch
from agents.trainer.data.hub_fetch import fetch_model

BLOB = "a" * 64


@pytest.fixture
def blobs(tmp_path, monkeypatch):
    """Return the folder of the model's files, of which the hub has one of 1,000 bytes to offer."""

    def tell(api, model, **options):
        lfs = SimpleNamespace(sha256=BLOB)
        weights = SimpleNamespace(rfilename="model.safetensors", size=1000, lfs=lfs, blob_id="b")
        other = SimpleNamespace(rfilename="w.bin", size=1 << 60, lfs=None, blob_id="c")
        name = "consolidated.safetensors"
        copy = SimpleNamespace(rfilename=name, size=1 << 60, lfs=None, blob_id="d")
        return SimpleNamespace(siblings=[weights, other, copy], sha="c" * 40)

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", tell)
    return tmp_path / "cache" / "models--org--tiny" / "blobs"


def test_the_share_of_what_is_lacking_is_told(blobs, monkeypatch):
    said = []
    (blobs / "left.incomplete").parent.mkdir(parents=True)
    (blobs / "left.incomplete").write_bytes(bytes(777))  # of an earlier try: does not count

    def download(model, *, allow_patterns):
        (blobs / f"{BLOB}.incomplete").write_bytes(bytes(250))
        deadline_s = time.monotonic() + 20
        while not any(": 25 % of" in line for line in said):
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        (blobs / f"{BLOB}.incomplete").rename(blobs / BLOB)
        return ""

    monkeypatch.setattr(hub_fetch, "LOOK_S", 0.005)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_model("org/tiny", said.append)
    assert said[-1] == "downloading org/tiny: 25 % of 0.0 GiB"


def test_a_full_disk_is_named_before_anything_is_downloaded(blobs, tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=999)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("asked")
    )
    (tmp_path / "job.json").write_text('{"model": "org/tiny"}')
    assert hub_fetch.main([str(tmp_path / "job.json")]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "failed"
    assert said["message"].startswith(f"The disk of {tmp_path}/cache has 0.0 GiB free")
    # What is there already needs no room.
    blobs.mkdir(parents=True)
    (blobs / BLOB).write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: "")
    assert hub_fetch.main([str(tmp_path / "job.json")]) == 0


def test_without_a_network_the_cache_decides(blobs, monkeypatch):
    def refuse(api, model, **options):
        raise OSError("no route to host")

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda model, **options: asked.append(options) or ""
    )
    fetch_model("org/tiny", print)
    assert [options["local_files_only"] for options in asked] == [True]

    def find_nothing(model, **options):
        raise FileNotFoundError(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", find_nothing)
    with pytest.raises(ExpectedError, match="cannot be fetched from the hub: no route to host"):
        fetch_model("org/tiny", print)


def test_a_master_on_windows_or_in_the_bundle_can_run_it():
    code = (
        "import sys; import huggingface_hub, subprocess; sys.platform = 'win32'\n"
        "for name in ('fcntl', 'resource', 'numpy', 'pyarrow', 'torch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from agents import program\n"
        "sys.exit(program.main(['agents.trainer.data.hub_fetch', 'no such job']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=python_environ(os.environ, *same_source()),
        cwd=SAFE_FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout)["message"].startswith("no such job: ")

"""Models and data are downloaded where there is room, resumed where they ended, and verified."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from agents.errors import ExpectedError
from agents.shared.files.hub_cache import list_cache
from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source
from agents.trainer.data import hub_fetch, hub_files
from agents.trainer.data.hub import find_data
from agents.trainer.data.hub_fetch import fetch_data, fetch_model
from tests.fakes.model_site import REVISION, Fault, ModelSite, model_site

MODEL, TOKEN = "org/tiny", "hf_" + "t" * 34
WEIGHTS = bytes(range(250)) * 4
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "w.bin": bytes(100),
    "consolidated.safetensors": bytes(101),
}
BLOB = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSite]:
    """Serve a gated model to this process, which has the token."""
    with model_site(MODEL, FILES, (TOKEN,)) as site:
        site.use_here(monkeypatch, tmp_path / "cache", TOKEN)
        yield site


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "models--org--tiny" / "blobs"
    folder.mkdir(parents=True)
    return folder


def test_the_share_of_what_is_lacking_is_told(site, blobs, monkeypatch):
    said: list[str] = []
    told = threading.Event()
    (blobs / "left.incomplete").write_bytes(bytes(777))  # of an earlier try: does not count

    def report(text):
        said.append(text)
        told.set()

    # Half of the weights has arrived, and the rest follows once a share was told.
    site.before = lambda name, token: name != "model.safetensors" or told.wait(20)
    monkeypatch.setattr(hub_files, "LOOK_S", 0.005)
    fetch_model(MODEL, report)
    assert said[0].startswith("downloading org/tiny: ")
    assert said[0].endswith(" % of 0.0 GiB")


def test_what_training_does_not_use_is_not_downloaded(site, blobs):
    folder = fetch_model(MODEL)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted({name for name, _ in site.files}) == ["config.json", "model.safetensors"]
    site.files.clear()
    assert fetch_model(MODEL) == folder
    assert site.files == []


def test_an_interrupted_download_is_resumed_where_it_ended(site, blobs):
    (blobs / f"{BLOB}.incomplete").write_bytes(WEIGHTS[:600])
    assert [one.is_whole for one in list_cache(os.environ)] == [False]
    folder = fetch_model(MODEL)
    assert site.ranges == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (blobs / f"{BLOB}.incomplete").exists()
    (found,) = list_cache(os.environ)
    assert (found.name, found.kind, found.is_whole) == (MODEL, "model", True)
    assert found.revisions == (REVISION,)


def test_a_connection_that_is_cut_is_resumed_within_the_download(site, blobs, monkeypatch):
    cuts = iter([False])
    site.before = lambda name, token: name != "model.safetensors" or next(cuts, True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the tries of the hub's tools
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 64)
    folder = fetch_model(MODEL)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert site.ranges == ["model.safetensors"]


def test_wrong_content_is_refused_and_not_kept(site, blobs):
    site.altered.add("model.safetensors")
    with pytest.raises(ExpectedError, match=r"^model.safetensors of org/tiny arrives with other"):
        fetch_model(MODEL)
    assert not (blobs / BLOB).exists()
    assert not (blobs / f"{BLOB}.incomplete").exists()
    site.altered.clear()
    # A beginning that something has damaged is not kept either.
    (blobs / f"{BLOB}.incomplete").write_bytes(bytes(600))
    with pytest.raises(ExpectedError, match="arrives with other content"):
        fetch_model(MODEL)
    assert (fetch_model(MODEL) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_sends_more_than_the_file_fills_no_disk(site, blobs):
    etag = {"ETag": f'"{BLOB}"', "X-Repo-Commit": REVISION, "X-Linked-Size": str(len(WEIGHTS))}
    site.faults.append(Fault("model.safetensors", 200, etag, WEIGHTS * 50))
    with pytest.raises(ExpectedError, match="sends more bytes than the file has"):
        fetch_model(MODEL)
    assert sum(path.stat().st_size for path in blobs.iterdir()) <= len(WEIGHTS) + 100


@pytest.mark.parametrize("name", ["../../up.json", "/etc/x.json", "a/../../b.json"])
def test_a_name_that_leads_out_of_the_cache_is_refused(site, tmp_path, name):
    site.add("org/rows", kind="dataset", files={name: b"{}"})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ExpectedError, match="list of the files of org/rows cannot be used"):
        fetch_data("org/rows")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("answer", [{"blobId": "../x"}, {"size": -1}, {"size": None}])
def test_an_answer_without_hash_or_size_is_refused(site, answer):
    about = {"rfilename": "config.json", "blobId": "a" * 40, "size": 1, **answer}
    said = json.dumps({"id": MODEL, "sha": REVISION, "siblings": [about]}).encode()
    headers = {"Content-Type": "application/json"}
    site.faults.append(Fault(f"/api/models/{MODEL}", 200, headers, said))
    site.faults.append(Fault("resolve", 404))
    with pytest.raises(ExpectedError, match="cannot be"):
        fetch_model(MODEL)


def test_the_token_does_not_follow_a_file_to_another_host(site, blobs):
    with model_site("org/other", FILES, ()) as elsewhere:
        elsewhere.repos[0].is_gated = False
        site.faults.append(
            Fault(
                "resolve/" + REVISION + "/model.safetensors",
                302,
                {
                    "Location": f"{elsewhere.url}/org/other/resolve/main/model.safetensors",
                    "X-Linked-Etag": f'"{BLOB}"',
                    "X-Linked-Size": str(len(WEIGHTS)),
                    "X-Repo-Commit": REVISION,
                },
            )
        )
        folder = fetch_model(MODEL)
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
        assert elsewhere.files == [("model.safetensors", "")]
        assert {token for _, token in elsewhere.asked} == {""}
    assert {token for _, token in site.asked} == {TOKEN}


def test_a_revision_is_fetched_and_the_newest_stays_the_newest(site, blobs):
    older = {**FILES, "config.json": b'{"model_type": "mistral"}'}
    site.repos[0].branches["v1.0"] = ("d" * 40, older)
    newest = fetch_model(MODEL)
    folder = fetch_model(MODEL, revision="v1.0")
    assert folder.name == "d" * 40
    assert json.loads((folder / "config.json").read_bytes()) == {"model_type": "mistral"}
    assert fetch_model(MODEL) == newest
    assert set(list_cache(os.environ)[0].revisions) == {REVISION, "d" * 40}
    with pytest.raises(ExpectedError, match="has no such revision"):
        fetch_model(MODEL, revision="v9")


def test_data_is_fetched_as_the_hub_has_converted_it(site, tmp_path):
    rows = site.add("org/rows", kind="dataset", files={"rows.jsonl": b"{}\n", "pic.png": b"x"})
    folder = fetch_data("org/rows")
    assert [path.name for path in folder.iterdir()] == ["rows.jsonl"]
    converted = {
        "default/train/0000.parquet": b"PAR1",
        "default/test/0000.parquet": b"PAR2",
        "other/train/0000.parquet": b"PAR3",
        "default/more/0000.parquet": b"PAR4",
    }
    rows.branches["refs/convert/parquet"] = ("e" * 40, converted)
    folder = fetch_data("org/rows:default")
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet"))
    assert found == ["default/test/0000.parquet", "default/train/0000.parquet"]
    site.add("org/pictures", kind="dataset", files={"pic.png": b"x"})
    with pytest.raises(ExpectedError, match="has no data file that Rackless reads"):
        fetch_data("org/pictures")


def test_a_run_downloads_its_data_in_the_same_way(site, tmp_path, monkeypatch):
    rows = site.add("org/rows", kind="dataset", files={"train.jsonl": b'{"text": "a"}\n'})
    found = find_data("org/rows")
    assert [path.read_bytes() for path in found.paths] == [rows.files["train.jsonl"]]
    site.faults.append(Fault("/", 500))
    assert find_data("org/rows") == found  # from the cache
    site.faults.clear()
    site.altered.add("train.jsonl")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ExpectedError, match=r"^train.jsonl of org/rows arrives with other"):
        find_data("org/rows")


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (401, {}, "does not accept this node's token, for org/tiny"),
        (403, {"X-Error-Code": "GatedRepo"}, "behind a licence on the hub"),
        (404, {"X-Error-Code": "RepoNotFound"}, "it is missing or private"),
        (429, {"Retry-After": "0"}, "answers no more requests of this node for now"),
        (500, {}, "cannot be fetched from the hub"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(site, status, headers, message):
    site.faults.append(Fault("/api/", status, headers))
    with pytest.raises(ExpectedError, match=message):
        fetch_model(MODEL)


def test_a_full_disk_is_named_before_anything_is_downloaded(site, tmp_path, monkeypatch, capsys):
    blobs = tmp_path / "cache" / "models--org--tiny" / "blobs"
    usage = SimpleNamespace(free=len(WEIGHTS) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    (tmp_path / "job.json").write_text('{"model": "org/tiny"}')
    assert hub_fetch.main([str(tmp_path / "job.json")]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "failed"
    assert said["message"].startswith(f"The disk of {tmp_path}/cache has 0.0 GiB free")
    assert "model.safetensors" not in [name for name, _ in site.files]
    # What is there already needs no room.
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / BLOB).write_bytes(WEIGHTS)
    assert hub_fetch.main([str(tmp_path / "job.json"), str(tmp_path / "report.json")]) == 0
    folder = Path(json.loads((tmp_path / "report.json").read_text())["folder"])
    assert folder.name == REVISION


def test_a_download_follows_no_list_of_pages_and_asks_only_for_its_files(site, blobs):
    fetch_model(MODEL)
    asked = [path for path, _ in site.asked]
    assert not any("/tree/" in path for path in asked)
    assert (blobs.parent / "refs" / "main").read_text() == REVISION
    # The hub's own tools find it without asking.
    offline = huggingface_hub.snapshot_download(MODEL, local_files_only=True)
    assert Path(offline) == blobs.parent / "snapshots" / REVISION


def test_a_cache_without_links_is_filled_and_found(site, blobs, monkeypatch):
    def refuse(self, target, target_is_directory=False):
        raise OSError("a required privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = fetch_model(MODEL)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    for blob in blobs.iterdir():
        blob.unlink()  # the hub's tools move them there
    (blobs.parent / "refs" / "main").unlink()
    site.files.clear()
    assert fetch_model(MODEL) == folder
    assert "model.safetensors" not in [name for name, _ in site.files]


def test_a_file_too_large_for_http_is_left_to_the_hubs_tools_and_verified(site, blobs, monkeypatch):
    arrived = [bytes(len(WEIGHTS)), WEIGHTS]

    def download(repo, name, *, repo_type=None, revision=None):
        path = blobs / (BLOB if name == "model.safetensors" else name)
        path.write_bytes(FILES[name] if name == "config.json" else arrived.pop(0))
        return str(path)

    monkeypatch.setattr(huggingface_hub.constants, "MAX_HTTP_DOWNLOAD_SIZE", len(WEIGHTS) - 1)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ExpectedError, match="arrives with other content"):
        fetch_model(MODEL)
    assert not (blobs / BLOB).exists()
    assert (fetch_model(MODEL) / "model.safetensors").read_bytes() == WEIGHTS


def test_without_a_network_the_cache_decides(site, monkeypatch):
    def refuse(api, model, **options):
        raise OSError("no route to host")

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
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


@pytest.mark.parametrize("job", [None, '{"data": "../x"}'])
def test_a_master_on_windows_or_in_the_bundle_can_run_it(job, tmp_path):
    code = (
        "import sys; import huggingface_hub, subprocess; sys.platform = 'win32'\n"
        "for name in ('fcntl', 'resource', 'numpy', 'pyarrow', 'torch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from agents import program\n"
        "sys.exit(program.main(['agents.trainer.data.hub_fetch', sys.argv[1]]))\n"
    )
    path = tmp_path / "no such job"
    if job is not None:
        path = tmp_path / "job.json"
        path.write_text(job)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=python_environ(os.environ, *same_source()),
        cwd=SAFE_FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout)["message"].startswith(f"{path}: ")

"""Links, pipes and devices in folders of strangers: none brings in a file from outside."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.contract.requests.exports import Origin
from agents.errors import ExpectedError
from agents.node.checkpoints import verify
from agents.node.files import send
from agents.quantizers.job.job import copy_companions
from agents.state import Home, open_home
from agents.trainer.checkpoint.fingerprint import hash_model
from agents.trainer.data.hub import find_data as find_data_on_node
from app.artifacts.bundle import bundle_artifact, read_artifact
from app.artifacts.copies import copy_artifact, push_artifact
from app.artifacts.deletion import delete_artifact
from app.artifacts.record import add_folder, record_export
from app.artifacts.serving import ServeCommand
from app.artifacts.serving_files import write_modelfile
from app.errors import UserError
from app.library.data import find_data
from app.library.models import find_model
from app.runs.services import Services
from tests.fakes.artifacts import make_folder
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.hub import TOKEN, open_hub
from tests.fakes.models import write_model

Attack = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = '{"text": "a private letter"}\n'
CONFIG = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make_services(tmp_path / "home", FakeCluster("alpha"))


@pytest.fixture
def letter(tmp_path: Path) -> Path:
    """Return a private file that is in no folder of these tests."""
    (tmp_path / "private").mkdir()
    path = tmp_path / "private" / "letter.jsonl"
    path.write_text(SECRET)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "public"}\n')
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def refuse(attempt: Callable[[], object]) -> str:
    """Return the words with which an attempt is refused."""
    with pytest.raises((UserError, ExpectedError)) as caught:
        attempt()
    assert caught.value.hint
    return str(caught.value)


def plant(place: Path, letter: Path, way: str) -> str:
    """Put a way out into a folder and return what it is called there."""
    if way == "a link to a file":
        (place / "z.jsonl").symlink_to(letter)
        return "z.jsonl"
    if way == "a relative link":
        (place / "z.jsonl").symlink_to(os.path.relpath(letter, place))
        return "z.jsonl"
    if way == "a link to a folder":
        (place / "z").symlink_to(letter.parent)
        return "z"
    if way == "a link by way of another":
        (place / ".x").symlink_to(letter.parent)
        (place / "z.jsonl").symlink_to(Path(".x", letter.name))
        return "z.jsonl"
    if way == "a link below":
        (place / "below").mkdir()
        (place / "below" / "z.jsonl").symlink_to(letter)
        return "below/z.jsonl"
    (place / "z.jsonl").symlink_to(place / "z.jsonl")
    return "z.jsonl"


WAYS = (
    "a link to a file",
    "a relative link",
    "a link to a folder",
    "a link by way of another",
    "a link below",
    "a link in a circle",
)


@pytest.mark.parametrize("way", WAYS)
def test_no_link_in_a_data_folder_brings_in_a_file_from_outside(
    services: Services, data: Path, letter: Path, way: str, attack: Attack
) -> None:
    name = plant(data, letter, way)
    said = refuse(lambda: find_data(str(data), "data.train", services.hashes))
    attack(given=f"a data folder with {way}", tried="send it to the nodes", happened=said)
    assert str(data / name) in said
    said = refuse(lambda: find_data_on_node(str(data)))
    attack(given=f"a data folder with {way}", tried="train on it on a node", happened=said)
    assert str(data / name) in said


def make_special(place: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(place.parent)  # the path of a socket has at most 107 bytes
            server.bind(place.name)
            os.chdir(here)
    else:
        place.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_by_name_in_a_data_folder(
    services: Services, data: Path, kind: str, attack: Attack
) -> None:
    make_special(data / "z.jsonl", kind)
    said = refuse(lambda: find_data(str(data), "data.train", services.hashes))
    attack(given=f"a data folder with a {kind}", tried="send it to the nodes", happened=said)
    assert str(data / "z.jsonl") in said
    assert str(data / "z.jsonl") in refuse(lambda: find_data_on_node(str(data)))


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "model-2.safetensors"])
@pytest.mark.parametrize("way", ["a link", "a pipe"])
def test_a_model_folder_is_sent_without_files_from_outside(
    services: Services, model: Path, letter: Path, name: str, way: str, attack: Attack
) -> None:
    if way == "a link":
        (model / name).symlink_to(letter)
    else:
        os.mkfifo(model / name)
    if name.endswith(".safetensors"):
        # Other weights than those of the list are not sent.
        (model / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {"a.weight": name}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refuse(lambda: find_model(str(model), services.hashes))
    attack(given=f"a model folder whose {name} is {way}", tried="send it", happened=said)
    assert str(model / name) in said


@pytest.mark.parametrize("way", ["a link", "a pipe"])
def test_a_node_reads_no_model_with_files_from_outside(
    model: Path, letter: Path, tmp_path: Path, way: str, attack: Attack
) -> None:
    if way == "a link":
        (model / "tokenizer.json").symlink_to(letter)
    else:
        os.mkfifo(model / "tokenizer.json")
    (tmp_path / "export").mkdir()
    for attempt in (
        lambda: hash_model(model, None),
        lambda: copy_companions(model, tmp_path / "export"),
    ):
        said = refuse(attempt)
        assert str(model / "tokenizer.json") in said
    attack(given=f"a model whose tokenizer is {way}", tried="train and export", happened=said)


@pytest.mark.parametrize("way", WAYS[:5])
def test_an_artifact_is_never_registered_with_files_from_outside(
    services: Services, model: Path, letter: Path, way: str, attack: Attack
) -> None:
    name = plant(model, letter, way)
    said = refuse(lambda: add_folder(services, model))
    attack(given=f"a folder of a model with {way}", tried="artifacts add", happened=said)
    assert str(model / name) in said


def test_an_artifact_is_never_run_with_files_from_outside(
    services: Services, model: Path, letter: Path, attack: Attack
) -> None:
    (model / "tokenizer.json").symlink_to(letter)
    artifact = read_artifact(model)
    said = refuse(lambda: bundle_artifact(artifact, None, services.hashes))
    attack(given="an artifact with a link", tried="chat with it on a node", happened=said)
    assert str(model / "tokenizer.json") in said


@pytest.mark.parametrize("where", ["the hub", "a folder"])
def test_a_file_that_became_a_link_is_neither_pushed_nor_copied(
    services: Services,
    model: Path,
    letter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    attack: Attack,
) -> None:
    (model / "README.md").write_text("x" * len(SECRET))
    made = add_folder(services, model)
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(letter)
    if where == "a folder":
        work = copy_artifact(services, made, str(tmp_path / "copy"), lambda text: None)
        said = refuse(lambda: asyncio.run(work))
    else:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with open_hub() as hub:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
            work = push_artifact(services, made, "anna/poems", True, lambda text: None)
            said = refuse(lambda: asyncio.run(work))
            assert hub.models.get("anna/poems", {}) == {}
    attack(given="an artifact whose card became a link", tried=f"to {where}", happened=said)
    assert str(model / "README.md") in said


def test_deleting_an_artifact_deletes_nothing_behind_a_link(
    services: Services, model: Path, tmp_path: Path, attack: Attack
) -> None:
    (model / "adapter").mkdir()
    (model / "adapter" / "a.json").write_text("{}")
    made = add_folder(services, model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.json").write_text("{}")
    (model / "adapter" / "a.json").unlink()
    (model / "adapter").rmdir()
    (model / "adapter").symlink_to(tmp_path / "mine")
    asyncio.run(delete_artifact(services, made, None, True))
    left = sorted(path.name for path in (tmp_path / "mine").iterdir())
    attack(given="an artifact whose folder became a link", tried="delete it", happened=str(left))
    assert left == ["a.json"]


def test_a_modelfile_is_never_written_through_a_link(
    services: Services, tmp_path: Path, attack: Attack
) -> None:
    origin = Origin(base="org/base", data="x.jsonl", run_id="r-1", run_name="poems", step=40)
    folder = make_folder(tmp_path / "out", origin, "gguf", "Q8_0")
    made = record_export(services, folder, "gguf", ("Q8_0",), origin)
    (tmp_path / "profile").write_text("mine")
    for name in ("Modelfile-Q8_0", "Modelfile-Q8_0.new"):
        (folder / name).symlink_to(tmp_path / "profile")
    command = ServeCommand(
        runtime="ollama",
        title="Ollama",
        command="ollama run",
        modelfile="FROM x",
        modelfile_name="Modelfile-Q8_0",
    )
    write_modelfile(made, command)
    said = (tmp_path / "profile").read_text()
    attack(given="an artifact with a link for its Modelfile", tried="serve it", happened=said)
    assert said == "mine"
    assert (folder / "Modelfile-Q8_0").read_text() == "FROM x"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "agent"))
    return open_home()


@pytest.mark.parametrize("way", [way for way in WAYS[:5] if "another" not in way])
def test_a_node_sends_no_file_from_outside(
    home: Home, letter: Path, way: str, attack: Attack
) -> None:
    folder = home.path / "artifacts" / "poems"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    name = plant(folder, letter, way)
    out = io.BytesIO()
    said = refuse(lambda: send(home, "artifacts/poems", out))
    attack(given=f"an artifact on a node with {way}", tried="fetch it", happened=said)
    assert str(folder / name) in said
    assert out.getvalue() == b""


def test_a_checkpoint_with_a_pipe_or_a_link_is_damaged(
    home: Home, letter: Path, attack: Attack
) -> None:
    folder = home.checkpoints("r-1") / "step-00000010"
    folder.mkdir(parents=True)
    entry = {"path": "weights.safetensors", "size_bytes": len(SECRET), "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps({"files": [entry], "attempt": 1, "step": 10}))
    (folder / "weights.safetensors").symlink_to(letter)
    problem = verify(home, "r-1", 10).problem
    attack(given="a checkpoint with a link", tried="verify it", happened=problem)
    assert "leads out of" in problem
    (folder / "weights.safetensors").unlink()
    os.mkfifo(folder / "weights.safetensors")
    code = (
        "from agents.state import open_home\nfrom agents.node.checkpoints import verify\n"
        "print(verify(open_home(), 'r-1', 10).problem)"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RACKLESS_AGENT_HOME": str(home.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=20
    )
    attack(given="a checkpoint with a pipe", tried="verify it", happened=found.stdout)
    assert "is a pipe, not a file" in found.stdout


def test_links_inside_a_folder_and_into_the_cache_of_the_hub_are_followed(
    services: Services, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hf download` leaves them; there is no other copy of those files."""
    (data / "b.jsonl").symlink_to("a.jsonl")
    found = find_data(str(data), "data.train", services.hashes)
    assert [file.path for file in found.files] == ["a.jsonl", "b.jsonl"]
    cache = tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for repository in (cache / "models--org--tiny", tmp_path / "disk" / "models--org--tiny"):
        snapshot = repository / "snapshots" / "1234"
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        names = ["config.json", "model.safetensors", "tokenizer.json"]
        write_model(repository / "blobs")
        for name in names:
            (repository / "blobs" / name).rename(repository / "blobs" / f"hash-{name}")
            (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
        sent = find_model(str(snapshot), services.hashes)
        assert [file.path for file in sent.files] == names
    (data / "c.jsonl").symlink_to(cache / "models--org--tiny" / "blobs" / "hash-config.json")
    found = find_data(str(data), "data.train", services.hashes)
    assert len(found.files) == 3


def test_a_link_that_the_user_names_is_followed_to_the_file_itself(
    services: Services, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "short.jsonl").symlink_to(data / "a.jsonl")
    found = find_data(str(tmp_path / "mine" / "short.jsonl"), "data.train", services.hashes)
    assert (found.root, found.member) == (str(data), "a.jsonl")


def test_a_repository_of_the_hub_that_is_a_link_to_another_disk_is_followed(
    services: Services, letter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People move large ones, and give them names of their own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    moved = tmp_path / "disk" / "tiny"
    snapshot = moved / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (moved / "blobs").mkdir()
    write_model(moved / "blobs")
    for path in sorted((moved / "blobs").iterdir()):
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    named = tmp_path / "hf" / "hub" / "models--org--tiny"
    named.parent.mkdir(parents=True)
    named.symlink_to(moved)
    sent = find_model(str(named / "snapshots" / "1234"), services.hashes)
    assert [file.path for file in sent.files] == [path.name for path in sorted(snapshot.iterdir())]
    # Of an archive whose blobs are a link to anywhere, none is followed.
    (moved / "blobs").rename(tmp_path / "elsewhere")
    (moved / "blobs").symlink_to(tmp_path / "elsewhere")
    said = refuse(lambda: find_model(str(named / "snapshots" / "1234"), services.hashes))
    assert "leads out of" in said

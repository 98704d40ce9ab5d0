"""Files on a share are used where they lie once their content is proved, and never waited for."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from agents import file_hashes
from agents.contract.in_place import PlaceAnswer, PlaceQuery
from agents.contract.requests.shared import PlaceQueries
from agents.contract.run import FileEntry
from agents.contract.shares import Share
from agents.contract.wire import to_wire
from agents.node import shared_files
from agents.node.shared_files import Search, find_place, find_shared, probe
from agents.state import Home, agent_command
from tests.fakes.share import FakeShare, can_mount, mounted_share

needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")
SHARE = Share(kind="nfs", server="nas", path="/models/tiny")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir(mode=0o700)
    return Home(tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "served" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


@pytest.fixture
def share(model: Path, tmp_path: Path) -> Iterator[FakeShare]:
    with mounted_share(model.parent, tmp_path / "mnt") as made:
        yield made


def describe(folder: Path, *names: str) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(
            path=name,
            size_bytes=(folder / name).stat().st_size,
            sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        )
        for name in names
    )


def ask(folder: Path, share: Share | None = SHARE) -> PlaceQuery:
    files = describe(folder, "config.json", "model.safetensors")
    return PlaceQuery(is_model=True, paths=(str(folder),), share=share, files=files)


def find(home: Home, query: PlaceQuery) -> PlaceAnswer:
    return find_place(home, query, Search())


def test_the_same_content_is_used_in_place_and_read_once(
    home: Home, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find(home, ask(model))
    # The master says that it is shared; this node has it on its own disk, as a server would.
    assert found == PlaceAnswer(path=str(model), share=str(model))

    def refuse(*args: object) -> str:
        raise AssertionError("a file was read again")

    query = ask(model)
    monkeypatch.setattr(file_hashes, "hash_file", refuse)
    assert find(home, query) == found
    os.utime(model / "config.json")
    with pytest.raises(AssertionError, match="read again"):
        find(home, query)


def shorten_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x")


def change_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"Weights" * 1000)


def link_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def put_a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (shorten_weights, "model.safetensors has 1 bytes instead of 7000"),
        (change_weights, "model.safetensors has different content"),
        (lambda folder: (folder / "config.json").unlink(), "tiny has no config.json"),
        (lambda folder: (folder / "extra.json").write_text("{}"), "tiny has extra.json as well"),
        (link_out, "leads out of"),
        (put_a_pipe, "is a pipe, not a file"),
    ],
)
def test_what_is_not_the_same_is_not_used(
    home: Home, model: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    query = ask(model)
    spoil(model)
    found = find(home, query)
    assert found.path is None
    assert problem in found.problem


def test_files_that_training_does_not_read_do_not_matter(home: Home, model: Path) -> None:
    query = ask(model)
    for name in ("README.md", "pytorch_model.bin", ".cache.json", "modeling.py"):
        (model / name).write_text("x")
    assert find(home, query).path == str(model)


def test_data_is_compared_as_a_file_or_as_a_folder_with_all_its_rows(
    home: Home, tmp_path: Path
) -> None:
    folder = tmp_path / "sets"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text('{"text": "x"}\n')
    one = PlaceQuery(
        is_model=False,
        paths=(str(folder),),
        share=SHARE,
        files=describe(folder, "a.jsonl"),
        member="a.jsonl",
    )
    assert find(home, one).path == str(folder / "a.jsonl")
    whole = PlaceQuery(
        is_model=False, paths=(str(folder),), share=SHARE, files=describe(folder, "a.jsonl")
    )
    assert find(home, whole).problem == f"{folder} has b.jsonl as well"


def test_a_folder_that_is_not_there_is_no_problem(home: Home, model: Path) -> None:
    query = ask(model)
    model.rename(model.with_name("moved"))
    assert find(home, query) == PlaceAnswer()


@needs_mount
def test_a_mounted_share_is_found_by_its_name_and_at_another_place(
    home: Home, model: Path, share: FakeShare, tmp_path: Path
) -> None:
    there = share.place / "tiny"
    answer = PlaceAnswer(path=str(there), share="nas:/models/tiny")
    assert find(home, ask(there, share=None)) == answer
    # Another path on the master, and the same folder of the server.
    files = ask(there).files
    sshfs = Share(kind="sshfs", server="nas", path="/models/tiny")
    query = PlaceQuery(is_model=True, paths=("/elsewhere/tiny",), share=sshfs, files=files)
    assert find(home, query) == answer
    # Through a link of this node.
    (tmp_path / "link").symlink_to(there)
    assert find(home, ask(tmp_path / "link", share=None)).share == "nas:/models/tiny"


def run_agent(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*agent_command(), *arguments],
        env={**os.environ, "RACKLESS_AGENT_HOME": str(home.path)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def say_places(lines: Sequence[str]) -> list[dict[str, str]]:
    said: dict[str, list[dict[str, str]]] = json.loads(lines[-1])
    return said["answers"]


@needs_mount
def test_a_server_that_stands_still_is_answered_for(
    home: Home, model: Path, share: FakeShare, capsys: pytest.CaptureFixture[str]
) -> None:
    there = share.place / "tiny"
    queries = PlaceQueries(queries=(ask(model), ask(there)))
    job = home.path / "job.json"
    job.write_text(json.dumps(to_wire(queries)))
    done = run_agent(home, "shared", str(job))
    assert done.returncode == 0, done.stderr
    assert [one["path"] for one in say_places(done.stdout.splitlines())] == [str(model), str(there)]
    assert run_agent(home, "probe", str(there)).returncode == 0
    share.freeze()
    begun_s = time.monotonic()
    find_shared(home, job, silence_s=0.5)
    assert time.monotonic() - begun_s < 5
    first, second = say_places(capsys.readouterr().out.splitlines())
    # What was compared before that is still told.
    assert first["path"] == str(model)
    assert second["path"] is None
    assert "does not answer" in second["problem"]
    share.go_on()


def test_a_probe_says_which_file_cannot_be_read(model: Path) -> None:
    assert probe(model) == probe(model / "config.json") == ""
    (model / "gone.json").symlink_to("nowhere")
    assert "gone.json" in probe(model)
    assert "No such file" in probe(model / "absent")


def test_progress_is_told_while_content_is_compared(
    home: Home, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_files, "_REPORT_S", 0.0)
    compare = shared_files.compare

    def compare_slowly(*args: object) -> str:
        found = compare(*args)  # type: ignore[arg-type]
        time.sleep(0.2)
        return found

    monkeypatch.setattr(shared_files, "compare", compare_slowly)
    job = home.path / "job.json"
    job.write_text(json.dumps(to_wire(PlaceQueries(queries=(ask(model),)))))
    find_shared(home, job)
    first, *_, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["kind"] == "progress"
    assert "0.0 GB read" in first["message"]
    assert last["kind"] == "places"

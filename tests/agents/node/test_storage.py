"""What lies on a node's disk is listed once, and deleted only while nothing there needs it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agents.contract.requests.storage import Freed, StorageReport
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.file_store import FileStore
from agents.node.storage import DAY_S, UNNAMED, delete_storage, list_storage
from agents.serve.handlers import find_handler
from agents.state import Home, locked
from agents.supervisor.leases import borrow_device
from tests.agents.node.test_checkpoints import make
from tests.draws import random_bytes

KIB = 1 << 10
MODEL, DATA = "models/llama-0011", "data/rows-0022"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    for name in ("leases", "runs"):
        (tmp_path / name).mkdir()
    return made


def put(home: Home, name: str, age_s: float = 2 * DAY_S, size: int = 64 * KIB) -> Path:
    """A folder with one file of random bytes."""
    file = home.path / name / "file"
    file.parent.mkdir(parents=True)
    file.write_bytes(random_bytes(size, name))
    return age(file.parent, age_s)


def age(path: Path, age_s: float) -> Path:
    then_s = time.time() - age_s
    for one in (*(path.iterdir() if path.is_dir() else ()), path):
        os.utime(one, (then_s, then_s))
    return path


def put_attempt(home: Home, run_id: str, model: str, state: str) -> None:
    folder = home.path / "runs" / run_id / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "intent.json").write_text(json.dumps({"model_path": str(home.path / model)}))
    (folder / "exit.json").write_text(json.dumps({"state": state}))


def needs(home: Home) -> dict[str, str]:
    return {item.name: item.needed_by for item in list_storage(home).items}


def test_files_with_two_names_count_once(home: Home) -> None:
    file = put(home, MODEL) / "file"
    FileStore(home.path).adopt(hashlib.sha256(file.read_bytes()).hexdigest(), file)
    make(home)
    put(home, "runs/run-1/exports/gguf")
    put(home, "runs/run-1/attempts/1")
    os.utime(put(home, "cache/tokens"), (-1.0, -1.0))  # before 1970
    answer = find_handler("storage.list")
    assert answer is not None
    report = from_wire(StorageReport, to_wire(answer(SimpleNamespace(home=home, args={}))))
    for odd in ({"used_s": 1e300}, {"name": "../key"}, {"size_bytes": -1}):
        with pytest.raises(WireError):
            from_wire(
                StorageReport, {**to_wire(report), "items": [{**to_wire(report.items[0]), **odd}]}
            )
    sizes = {(item.kind, item.name): item.size_bytes for item in report.items}
    block = 64 * KIB
    assert sizes["model", MODEL] == sizes["cache", "cache/tokens"] == block
    assert sizes["artifact", "runs/run-1/exports/gguf"] == sizes["run", "runs/run-1"] == block
    assert ("checkpoint", "runs/run-1/checkpoints/step-00000100") in sizes
    assert not [item for item in report.items if item.kind == "store"]
    assert report.size_bytes == sum(sizes.values()) < 5 * block
    delete = find_handler("storage.delete")
    assert delete is not None
    call = SimpleNamespace(home=home, args={"names": [MODEL]})
    assert delete(call) == Freed(freed_bytes=block)
    assert not list(home.path.glob("store/files/*/*"))
    assert not (home.path / MODEL).exists()


def test_what_a_run_or_other_work_needs_stays(home: Home) -> None:
    for name in (MODEL, "models/done-1", DATA, "cache/compiled"):
        put(home, name)
    put(home, "models/new-1", age_s=60)
    put_attempt(home, "r-1", MODEL, "stopped")
    put_attempt(home, "r-2", "models/done-1", "done")
    found = needs(home)
    assert found[MODEL] == "run r-1"
    assert found["models/new-1"] == "a start that it may have been sent for"
    assert found["models/done-1"] == found[DATA] == found["cache/compiled"] == ""
    with pytest.raises(ExpectedError, match="not deleted: run r-1 needs it by now"):
        delete_storage(home, [MODEL])
    with borrow_device(home, "gpu-0", "the chat of poems", "pc", lambda work: False):
        found = needs(home)
        assert found[DATA] == "the chat of poems"
        assert found["cache/compiled"] == "work that is running"
        with pytest.raises(ExpectedError, match="the chat of poems needs it"):
            delete_storage(home, [DATA])
    assert delete_storage(home, ["models/done-1", DATA, "cache/compiled", DATA]) == 3 * 64 * KIB
    assert (home.path / MODEL / "file").exists()


def test_only_old_transfers_and_files_without_a_name_go(home: Home) -> None:
    store = FileStore(home.path)
    for letter, age_s in (("a", 2 * DAY_S), ("b", 60)):
        partial = store.partial(letter * 64)
        partial.write_bytes(bytes(8 * KIB))
        age(partial, age_s)
        stored = store.path(letter * 64)
        stored.parent.mkdir(parents=True)
        stored.write_bytes(bytes(8 * KIB))
        age(stored, age_s)
    old = "store/partial/" + "a" * 64
    put(home, "models/.partial-llama-0011")
    with locked(home.path / f"{old}.lock", 0.0, ""):
        assert needs(home)[old] == "a transfer that is running or may resume"
        with pytest.raises(ExpectedError, match="is being written"):
            delete_storage(home, [old])
    found = {name for name, need in needs(home).items() if not need}
    assert found == {old, "models/.partial-llama-0011", UNNAMED}
    young = "store/partial/" + "b" * 64
    with pytest.raises(ExpectedError, match="may resume needs it"):
        delete_storage(home, [young])
    assert delete_storage(home, sorted(found)) == (64 + 8 + 8) * KIB
    assert (home.path / young).exists()
    assert store.path("b" * 64).exists()
    assert not store.path("a" * 64).exists()


@pytest.mark.parametrize(
    "name",
    ["models", "../x/y", "models/..", "models/.partial-", "artifacts/poems-1", "runs/r-1",
     "agents", "store/files/aa", "models/a/b", "/etc/passwd"],
)  # fmt: skip
def test_nothing_else_is_deleted(home: Home, name: str) -> None:
    with pytest.raises(ExpectedError):
        delete_storage(home, [name])

"""Several sources are checked together before anything is sent."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from agents.contract.data import SourceSpec
from agents.contract.spec import DataSpec, RunSpec
from app.errors import UserError
from app.library.bundles import Source
from app.library.data import find_data
from app.library.data_key import make_data_key
from app.library.data_size import guess_sources
from app.library.sent_files import list_sent
from app.runs.inputs.run_inputs import Inputs, find_sources
from app.runs.run_repository import list_files
from app.storage.database import open_database
from app.storage.hashes import HashStore


def write(path: Path, count: int) -> Path:
    rows = [{"instruction": f"Hi {n}", "output": "Ho"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_data(*sources: SourceSpec | Path, **settings: object) -> DataSpec:
    named = tuple(
        one if isinstance(one, SourceSpec) else SourceSpec(path=str(one)) for one in sources
    )
    return DataSpec(train=named[0].path, sources=named, **settings)


@pytest.fixture
def find(tmp_path: Path):
    database = open_database(tmp_path / "rackless.sqlite3")
    yield partial(find_data, hashes=HashStore(database))
    database.close()


def test_each_source_is_sent_and_named(tmp_path: Path, find) -> None:
    data = make_data(write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 2), eval="1")
    found = find_sources(data, find)
    assert [Path(source.value).name for source in found] == ["a.jsonl", "b.jsonl"]
    inputs = Inputs(model=Source(value="m"), train=found[0], more=found[1:])
    assert list(inputs.named()) == ["the model", "the training data", "the training data (2)"]
    spec = RunSpec(model="m", data=data)
    assert list_files(spec) == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "m")
    assert [sent.key for sent in list_sent(spec)] == ["data.sources[0]", "data.sources[1]"]


def test_the_same_file_by_a_link_is_refused(tmp_path: Path, find) -> None:
    first = write(tmp_path / "a.jsonl", 3)
    (tmp_path / "b.jsonl").symlink_to(first)
    with pytest.raises(UserError, match="are the same data"):
        find_sources(make_data(first, tmp_path / "b.jsonl"), find)


@pytest.mark.parametrize(("ask", "fails"), [("5", True), ("4", False), ("900", True)])
def test_more_held_out_rows_than_there_are_are_refused_here(
    tmp_path: Path, find, ask: str, fails: bool
) -> None:
    data = make_data(write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 2), eval=ask)
    if not fails:
        assert len(find_sources(data, find)) == 2
        return
    with pytest.raises(UserError, match=f"{ask} rows are to be held out .* has only 5"):
        find_sources(data, find)


def test_a_split_that_is_not_there_is_refused_here(tmp_path: Path, find) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", 2)
    write(folder / "test.jsonl", 2)
    source = SourceSpec(path=str(folder), split="test")
    (found,) = find_sources(make_data(source), find)
    assert [file.path for file in found.files] == ["test.jsonl"]
    with pytest.raises(UserError, match=r"has no split dev; its files are test\.jsonl and train"):
        find_sources(make_data(SourceSpec(path=str(folder), split="dev")), find)


def test_a_source_without_rows_is_refused_by_its_name(tmp_path: Path, find) -> None:
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"b\.jsonl is empty"):
        find_sources(make_data(write(tmp_path / "a.jsonl", 3), tmp_path / "b.jsonl"), find)


def test_a_guess_counts_what_an_epoch_takes(tmp_path: Path) -> None:
    first, other = write(tmp_path / "a.jsonl", 100), write(tmp_path / "b.jsonl", 100)
    sources = (SourceSpec(path=str(first), max_rows=50), SourceSpec(path=str(other), weight=2.0))
    assert guess_sources(make_data(*sources)).num_rows == 250
    assert guess_sources(make_data(*sources, eval="0.1")).num_rows == 225
    assert guess_sources(make_data(first, SourceSpec(path="org/name"))).num_rows is None


def test_what_decides_the_rows_decides_the_key_of_the_data(tmp_path: Path) -> None:
    first, other = write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 2)
    kinds = [
        DataSpec(train=str(first)),
        DataSpec(train=str(first), eval="auto"),
        DataSpec(train=str(first), deduplicate="exact"),
        make_data(first, other),
        make_data(first, SourceSpec(path=str(other), weight=2.0)),
    ]
    keys = {make_data_key(RunSpec(model="m", data=data)) for data in kinds}
    assert len(keys) == len(kinds)

"""What a refusal of data offers can be taken with one click, and then the data is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.contract.data import SourceSpec
from agents.contract.spec import DataSpec, RunSpec
from app.errors import UserError
from app.library.data import find_data
from app.planning.advice.changes import apply_change
from app.presentation.offer_text import find_offer
from app.storage.database import open_database
from app.storage.hashes import HashStore

REFUSED: tuple[tuple[str, object, str], ...] = (
    ("a.jsonl", {"query": "2 + 2?", "response": "4"}, "the column 'query' as question"),
    ("b.jsonl", {"dialog": ["Hi", "Hello."]}, "the column 'dialog' as conversation"),
    ("c.jsonl", ["q", "a"], "the column '1' as answer"),
    ("d.jsonl", {"question": "q", "system_prompt": "s", "response": "a"}, "as system prompt"),
    (
        "e.jsonl",
        {"prompt": "q", "response_0": "b", "response_1": "a", "better_response_id": 1},
        "as place of the best answer",
    ),
    ("f.jsonl", {"prompt": "q", "completion": "a", "label": False}, "without 'label'"),
)


@pytest.mark.parametrize(("name", "row", "words"), REFUSED)
def test_taking_an_offer_reads_the_data(tmp_path: Path, name: str, row: object, words: str) -> None:
    (tmp_path / name).write_text(f"{json.dumps(row)}\n" * 3)
    require_taken(tmp_path, name, words)


def test_the_likely_encoding_is_taken(tmp_path: Path) -> None:
    text = "Gr\u00fc\u00dfe aus K\u00f6ln, sch\u00f6ne Stra\u00dfe.\n" * 30
    (tmp_path / "g.txt").write_bytes(text.encode("cp1252"))
    require_taken(tmp_path, "g.txt", "most likely written in cp1252")


def require_taken(folder: Path, name: str, words: str) -> None:
    hashes = HashStore(open_database(folder / "home.sqlite3"))
    path = str(folder / name)
    spec = RunSpec(model="m", data=DataSpec(train=path))
    with pytest.raises(UserError) as refused:
        find_data(path, "data.train", hashes, data=spec.data)
    offer = find_offer(refused.value, spec.data)
    assert offer is not None
    assert words in offer.text
    assert "data." not in offer.text + offer.label
    find_data(path, "data.train", hashes, data=apply_change(spec, offer.change).data)


def test_an_offer_for_one_of_several_sources_is_only_said() -> None:
    sources = (SourceSpec(path="a"), SourceSpec(path="b"))
    refused = UserError("b has no usable row", "Set data.columns: [text=content]")
    offer = find_offer(refused, DataSpec(train="a", sources=sources))
    assert offer is not None
    assert (offer.text, offer.change) == ("Read the column 'content' as plain text.", {})
    assert find_offer(UserError("b does not exist", "Check the path."), DataSpec(train="a")) is None

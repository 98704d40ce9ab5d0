"""The examples of docs/which-data.md are read as the page says, with and without a mapping."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally
from app.library.data import check_form

PAGE = (Path(__file__).parents[4] / "docs" / "which-data.md").read_text("utf-8")
FENCES = re.findall(r"^```json (\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROWS = [(name, line) for name, lines in FENCES for line in lines.splitlines()]
MAPPED = re.findall(r"^\| `(\{.*\})` \| `\[(.*)\]` \|$", PAGE, re.MULTILINE)


def read(folder: Path, row: str, columns: tuple[str, ...] = ()) -> tuple[str, list[Any]]:
    """Return format and rows, by the objective that fits."""
    path = folder / "a.jsonl"
    path.write_text(f"{row}\n", "utf-8")
    data = DataSpec(train="-", columns=columns)
    check_form(path, data=data)
    for objective in ("sft", "dpo"):
        tally = Tally(name="a.jsonl")
        reader = RowReader(find_files(path), data, objective, tally, enforce=True)
        try:
            rows = list(reader)
            tally.check_usable(len(rows))
            return reader.format, rows
        except ExpectedError as error:
            if objective == "dpo" or "need objective dpo" not in error.message:
                raise
    raise AssertionError(row)


@pytest.mark.parametrize(("data_format", "row"), ROWS)
def test_example_is_recognized(tmp_path: Path, data_format: str, row: str) -> None:
    found, rows = read(tmp_path, row)
    is_history = "history" in json.loads(row) and found == "chat"
    assert found == data_format or is_history
    assert len(rows) == 1


@pytest.mark.parametrize(("row", "mapping"), MAPPED)
def test_offer_is_the_one_of_the_page(tmp_path: Path, row: str, mapping: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{row}\n", "utf-8")
    tally = Tally(name="a.jsonl")
    with pytest.raises(ExpectedError) as refused:
        tally.check_usable(len(list(_read_refused(path, tally))))
    assert f"data.columns: [{mapping}]" in refused.value.hint
    assert len(read(tmp_path, row, tuple(one.strip() for one in mapping.split(",")))[1]) == 1


def _read_refused(path: Path, tally: Tally) -> RowReader:
    return RowReader(find_files(path), DataSpec(train="-"), "sft", tally, enforce=True)


@pytest.mark.parametrize(("label", "count"), [(False, 1), (True, 2)])
def test_only_good_rows(tmp_path: Path, label: bool, count: int) -> None:
    rows = [{"prompt": "2 + 2?", "completion": "5", "label": label}]
    rows += [{"prompt": "2 + 2?", "completion": "4", "label": True}]
    lines = "\n".join(map(json.dumps, rows))
    assert len(read(tmp_path, lines, ("good=label",))[1]) == count


def test_page_has_examples() -> None:
    assert len(ROWS) > 15
    assert len(MAPPED) > 10

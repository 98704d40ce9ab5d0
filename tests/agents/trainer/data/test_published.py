"""Rows of well-known data sets: each is read, or refused, and offers teach what they should.

`published.jsonl` has one row per data set in its own columns, with made-up texts. `learned` marks
the end token as $.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.fakes.site import DEMO

FILE = Path(__file__).parent / "published.jsonl"
SETS = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO / "model")[0]


def read(folder: Path, row: Any, tokenizer: Any, columns: str = "") -> tuple[str, str, list[str]]:
    """Return format, learned text and warned columns, by the objective that fits."""
    path = folder / "a.jsonl"
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    entries = tuple(one.strip() for one in columns.strip("[]").split(",") if one)
    for objective in ("sft", "dpo"):
        tally = Tally(name="a.jsonl")
        data = DataSpec(train="-", columns=entries)
        reader = RowReader(find_files(path), data, objective, tally, enforce=True)
        try:
            rows = list(reader)
            tally.check_usable(len(rows))
            break
        except ExpectedError as error:
            if objective == "dpo" or "need objective dpo" not in error.message:
                raise
    (found,) = tokenize_rows(tokenizer, rows, 4096)
    assert not isinstance(found, Skipped)
    texts = [tokenizer.decode(one.ids[one.is_target]) for one in found.segments]
    warned = sorted(one.column for one in reader.findings if one.consequence == "warn")
    return reader.format, " || ".join(texts).replace("<|end|>", "$"), warned


@pytest.mark.parametrize("case", SETS, ids=[case["name"] for case in SETS])
def test_is_read_or_refused(tmp_path: Path, tokenizer: Any, case: dict[str, Any]) -> None:
    if "refused" not in case:
        wanted = (case["format"], case["learned"], case.get("warns", []))
        assert read(tmp_path, case["row"], tokenizer) == wanted
        return
    with pytest.raises(ExpectedError) as refused:
        read(tmp_path, case["row"], tokenizer)
    assert case["refused"] in refused.value.message
    advice = case.get("advice", "")
    assert advice in refused.value.hint
    if not advice:
        assert "data.columns: [" not in refused.value.hint
        return
    if not case["then"].startswith("!"):
        assert read(tmp_path, case["row"], tokenizer, advice)[1] == case["then"]
        return
    with pytest.raises(ExpectedError) as again:  # named step by step
        read(tmp_path, case["row"], tokenizer, advice)
    assert case["then"][1:] in again.value.message

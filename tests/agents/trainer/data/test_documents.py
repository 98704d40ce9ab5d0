"""Text files are documents, and long text keeps every token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import Tokenized, find_ends, tokenize_rows
from tests.fakes.site import DEMO

BOOK = "Chapter 1\n\nIt was late.\nNobody came.\n\nChapter 2\n\nThe end.\n"
TOKENIZER = load_tokenizer(DEMO / "model")[0]


def read(path: Path, **options: Any) -> tuple[list[str], RowReader]:
    reader = RowReader(find_files(path), DataSpec(train="-", **options), "sft", Tally(name="a"))
    return [row.text for row in reader], reader


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_a_file_is_a_document_unless_asked_otherwise(tmp_path, name):
    path = tmp_path / name
    path.write_text(BOOK)
    assert read(path)[0] == [BOOK.strip()]
    parts = [part for part in BOOK.strip().split("\n\n")]
    assert read(path, documents="blank-line")[0] == parts
    assert read(path, documents="line")[0] == [line for line in BOOK.split("\n") if line]


def test_a_folder_has_a_document_per_file_which_is_told(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.md").write_text(f"# {number}\n\ntext\n")
    texts, reader = read(tmp_path)
    assert len(texts) == 3
    (told,) = (one for one in reader.findings if one.kind == "documents")
    assert (told.count, told.column) == (3, "file")


def test_runs_that_began_before_read_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(BOOK)
    reader = RowReader(find_files(path), DataSpec(train="-"), "sft", Tally(name="a"), rules=2)
    assert len(list(reader)) == 5


def tokenize(texts: list[str], mode: str, most: int = 24) -> list[Tokenized]:
    rows = [ConversationRow(number=place, text=text) for place, text in enumerate(texts, start=1)]
    found = list(tokenize_rows(TOKENIZER, rows, most, long_text=mode))
    return [one for one in found if not isinstance(one, Skipped)]


WORDS = st.sampled_from(["It ", "was ", "late. ", "Nobody\n", "came!\n\n", "x", "\u4f60\u3002"])


@given(st.lists(st.lists(WORDS, min_size=2, max_size=120).map("".join), min_size=1, max_size=4))
def test_every_token_is_in_exactly_one_piece(texts):
    texts = [text for text in texts if text.strip()]
    ends = find_ends(TOKENIZER)
    whole = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    pieces: dict[int, list[int]] = {}
    for one in tokenize(texts, "split"):
        (segment,) = one.segments
        assert len(segment.ids) <= 24
        pieces.setdefault(segment.row, []).extend(segment.ids[len(ends.begin) :])
    for row, found in pieces.items():
        assert found == [*whole[row - 1], *ends.end]
    joined = list(itertools.chain.from_iterable([*ends.begin, *ids, *ends.end] for ids in whole))
    blocks = [one.segments[0] for one in tokenize(texts, "join")]
    filled = np.concatenate([block.ids for block in blocks]).tolist() if blocks else []
    assert filled == joined[: len(filled)]
    assert len(joined) - len(filled) <= 1, "a single token has nothing to predict it"
    assert all(len(block.ids) == 24 for block in blocks[:-1])


def test_a_text_is_divided_at_the_end_of_a_paragraph_line_or_sentence():
    texts = ["One sentence here. Another one here.\n\nA second paragraph is here, and ends."]
    first = tokenize(texts, "split", 20)[0].segments[0]
    assert TOKENIZER.decode(first.ids).rstrip("\n").endswith("here.")


def test_other_ways_to_treat_long_text():
    texts = ["It was late. " * 20]
    (cut,) = tokenize(texts, "cut")
    assert cut.cut_from is not None
    with pytest.raises(ExpectedError, match=r"data\.long_text is refuse"):
        tokenize(texts, "refuse")
    assert len(tokenize(["It was late."], "refuse")) == 1

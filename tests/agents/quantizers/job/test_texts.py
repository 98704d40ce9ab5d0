"""Rows to calibrate with and to judge by come from where they should."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agents.contract.requests.exports import TextSource
from agents.errors import ExpectedError
from agents.quantizers.job.texts import read_texts
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.trainer.ranks import DEMO

TRAIN = TextSource(path=str(DEMO / "train.jsonl"))


def test_a_file_of_ones_own_calibrates_and_the_run_still_judges(tmp_path):
    tokenizer, _ = load_tokenizer(DEMO / "model")
    file = tmp_path / "own.txt"
    file.write_text("The river runs through the valley.\n" * 40)
    usual = read_texts([TRAIN], None, tokenizer)
    found = read_texts([TRAIN], None, tokenizer, TextSource(path=str(file)))
    assert found.held_out == usual.held_out
    assert len(found.calibration) == 40
    assert len(set(found.calibration)) == 1
    file.write_text("only three words\n")
    with pytest.raises(ExpectedError, match=r"own\.txt has only"):
        read_texts([TRAIN], None, tokenizer, TextSource(path=str(file)))


def test_pairs_and_conversations_calibrate_runs_of_either_objective(tmp_path):
    tokenizer, _ = load_tokenizer(DEMO / "model")
    pairs, plain = tmp_path / "pairs.jsonl", tmp_path / "own.txt"
    text = "The river runs through the valley."
    pair = {"prompt": "What runs there?", "chosen": text, "rejected": "Nothing."}
    pairs.write_text(f"{json.dumps(pair)}\n" * 40)
    plain.write_text(f"{text}\n" * 40)
    dpo = replace(TRAIN, path=str(pairs), objective="dpo")
    assert len(read_texts([TRAIN], None, tokenizer, TextSource(path=str(pairs))).calibration) == 40
    assert len(read_texts([dpo], None, tokenizer, TextSource(path=str(plain))).calibration) == 40


def test_data_in_another_encoding_calibrates(tmp_path):
    tokenizer, _ = load_tokenizer(DEMO / "model")
    file = tmp_path / "train.jsonl"
    file.write_text((DEMO / "train.jsonl").read_text("utf-8"), "utf-16-le")
    train = TextSource(path=str(file), encoding="utf-16-le")
    assert read_texts([train], None, tokenizer) == read_texts([TRAIN], None, tokenizer)


def test_rows_of_each_source_calibrate_and_judge(tmp_path):
    tokenizer, _ = load_tokenizer(DEMO / "model")
    first, second = tmp_path / "first.jsonl", tmp_path / "second.csv"
    row = {"instruction": "What runs there?", "output": "The river runs through the valley."}
    first.write_text(f"{json.dumps(row)}\n" * 40)
    second.write_text("q,a\n" + "Who lives there?,Ann lives there.\n" * 40)
    sources = [
        TextSource(path=str(first)),
        TextSource(path=str(second), columns=("instruction=q", "output=a")),
    ]
    found = read_texts(sources, None, tokenizer)
    alone = [read_texts([one], None, tokenizer) for one in sources]
    for rows in ("calibration", "held_out"):
        assert set(getattr(found, rows)) == {getattr(one, rows)[0] for one in alone}
    assert len(found.calibration) == 60
    again = read_texts(sources, TextSource(path=str(first)), tokenizer)
    assert len(again.calibration) == 80
    assert set(again.held_out) == set(alone[0].held_out)
    second.write_text("q,a\nWho?,Ann.\n")
    first.write_text(f"{json.dumps(row)}\n")
    with pytest.raises(ExpectedError, match=r"first\.jsonl and second\.csv have only"):
        read_texts(sources, None, tokenizer)

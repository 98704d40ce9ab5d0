"""Splits: which files of a data set their names put to training, and which aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.shared.data.splits import choose_split

FOLDER = Path("/data/train-test")


def choose(names, *, held_out):
    files = [FOLDER / name for name in names]
    chosen = choose_split(FOLDER, files, held_out=held_out)
    return [file.relative_to(FOLDER).as_posix() for file in chosen]


TRAIN = [
    "train.jsonl",
    "TRAIN.JSONL",
    "train-00000-of-00002.parquet",
    "train_sft-00000-of-00001.parquet",
    "training.csv",
    "alpaca_train_v2.json",
    "train/0000.parquet",
    "partial-train/0000.parquet",
    "unit-test/train.jsonl",
]
HELD_OUT = [
    *(f"{word}.jsonl" for word in ("test", "validation", "valid", "val", "dev", "eval")),
    "validation-00000-of-00001.parquet",
    "train-test-split/test.jsonl",
    "test/0.parquet",
]


@pytest.mark.parametrize(
    ("name", "held_out"), [*((n, False) for n in TRAIN), *((n, True) for n in HELD_OUT)]
)
def test_a_name_shows_the_split_of_a_file(name, held_out):
    assert choose([name], held_out=held_out) == [name]
    assert choose([name], held_out=not held_out) == []


@pytest.mark.parametrize("name", ["latest.jsonl", "devices.csv", "constraints.txt", "a.jsonl"])
def test_parts_of_words_and_the_folder_itself_tell_nothing(name):
    assert choose([name], held_out=True) == choose([name], held_out=False) == []


def test_validation_comes_before_test():
    names = ["test.jsonl", "train.jsonl", "valid.jsonl", "val-2.jsonl"]
    assert choose(names, held_out=True) == ["valid.jsonl", "val-2.jsonl"]
    assert choose(names[:2], held_out=True) == ["test.jsonl"]

"""Recognize the split of a data file, training or held out, by its name.

The words are those of Hugging Face's datasets library, which assigns
`data/train-00000-of-00002.parquet` and `train/0.jsonl` to the training split. Only whole words
count (`latest` contains no `test`), and a file's name takes precedence over its folder's.
https://huggingface.co/docs/datasets/repository_structure
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = {"validation": "validation", "valid": "validation", "val": "validation"}
HELD_OUT |= {"dev": "validation", "test": "test", "testing": "test"}
HELD_OUT |= {"eval": "test", "evaluation": "test"}
"""Words for held-out data, with the split that each one names."""


def choose_split(folder: Path, files: Iterable[Path], *, held_out: bool) -> list[Path]:
    """Return the files of one split; empty if no file name names it.

    Args:
        folder: folder of the data set; its own name does not count.
        files: files at any depth below it.
        held_out: True selects the validation split, or the test split if it is missing, instead of
            the training split.
    """
    found = [(file, _find_split(file.relative_to(folder))) for file in files]
    for wanted in ("validation", "test") if held_out else ("train",):
        chosen = [file for file, split in found if split == wanted]
        if chosen:
            return chosen
    return []


def _find_split(relative: Path) -> str | None:
    words = re.findall("[a-z]+", relative.with_suffix("").as_posix().lower())
    for word in reversed(words):
        if word.startswith("train"):  # training, trainset
            return "train"
        if word in HELD_OUT:
            return HELD_OUT[word]
    return None


def choose_named(folder: Path, files: Iterable[Path], split: str) -> list[Path]:
    """Return the files of a split by its name, such as `test` or `train_sft`.

    Args:
        folder: folder of the data set; its own name does not count.
        files: files at any depth below it.
        split: name of the split, as a whole part of a file's or folder's name.
    """
    named = re.compile(rf"(^|[/._-]){re.escape(split)}($|[/._-])", re.IGNORECASE)
    found = [file for file in files if named.search(file.relative_to(folder).as_posix())]
    # `train` also names the files of `train_sft`, unless some are of `train` alone.
    exact = re.compile(rf"(^|/)(partial-)?{re.escape(split)}(-\d+-of-\d+)?(\.|/|$)", re.IGNORECASE)
    return [file for file in found if exact.search(file.relative_to(folder).as_posix())] or found

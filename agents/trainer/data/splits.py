"""Tell by their names which files of a data set are for training and which are held out.

The words are those of the hub's own library, for which `data/train-00000-of-00002.parquet` and
`train/0.jsonl` are of the training split. They count as whole words only (`latest` and `devices`
name none), and the file's own name before that of its folder.
https://huggingface.co/docs/datasets/repository_structure
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = {"validation": "validation", "valid": "validation", "val": "validation"}
HELD_OUT |= {"dev": "validation", "test": "test", "testing": "test"}
HELD_OUT |= {"eval": "test", "evaluation": "test"}
"""Words for data that is not trained on, with the split that they mean."""


def choose_split(folder: Path, files: Iterable[Path], *, held_out: bool) -> list[Path]:
    """Return the files whose names are of one split; none where no name tells.

    Args:
        folder: what the files lie in; its own name says nothing.
        files: the files, some levels below it.
        held_out: take the validation split, or where there is none the test split; False: take
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

"""A data file to calibrate with: whether it is one, and whether it says enough.

Counted in words, before any node works: the exact number of tokens is known only to the model's
tokenizer, which lies on the nodes and refuses what is too short for it once more.
"""

from __future__ import annotations

import os
from pathlib import Path

from app.errors import UserError
from app.library.bundles import Source
from app.library.data import find_data
from app.storage.hashes import HashStore

LEAST_WORDS = 64
"""Fewer calibrate nothing; the nodes want as many tokens, of which a word has one or more."""
_READ_BYTES = 1 << 20
_FIRST_WITHOUT_SPACES = "\u0e01"
"""Of Thai; behind it come the scripts of East Asia, which write a text without spaces."""


def find_calibration(path: Path, hashes: HashStore) -> Source:
    """Return the bundle of a data file to calibrate with.

    Raises:
        UserError: there is no such file, it is no data, or it has too few words.
    """
    place = Path(os.path.expanduser(path)).absolute()
    found = find_data(str(place), "--calibration", hashes)
    _count_words(place)
    return found


def check_calibration(path: Path, hashes: HashStore) -> int:
    """Return how many words a data file has to calibrate with; 0: they were not counted.

    Raises:
        UserError: there is no such file, it is no data, or it has too few words.
    """
    place = Path(os.path.expanduser(path)).absolute()
    find_data(str(place), "--calibration", hashes)
    return _count_words(place)


def _count_words(path: Path) -> int:
    """Return the words in the first MiB of a data file; of a folder or a table of Parquet, 0.

    Raises:
        UserError: a file of text has fewer than `LEAST_WORDS`, or cannot be read.
    """
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return 0
    try:
        with path.open("rb") as file:
            text = file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", "Name another data file."
        ) from error
    words = sum(map(_count_in, text.split()))
    if words < LEAST_WORDS:
        raise UserError(
            f"{path.name} has {words} words; at least {LEAST_WORDS} are needed to calibrate with",
            "Name a data file with more text, or leave it to the run's own data.",
        )
    return words


def _count_in(word: str) -> int:
    """Return the words in a text without spaces; in Chinese, Thai and such each letter is one.

    >>> _count_in("poem."), _count_in("--"), _count_in("\\u6625\\u7720\\u4e0d")
    (1, 0, 3)
    """
    letters = [letter for letter in word if letter.isalnum()]
    alone = sum(letter >= _FIRST_WITHOUT_SPACES for letter in letters)
    return alone or int(bool(letters))

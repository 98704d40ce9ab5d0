"""Check that a calibration file is data and long enough.

Its words are counted here before any node starts working. The node counts its tokens later, since
only the nodes have the model's tokenizer.
"""

from __future__ import annotations

import os
from pathlib import Path

from agents.shared.files.folder_files import open_regular
from app.errors import UserError
from app.library.bundles import Source
from app.storage.hashes import HashStore

MIN_WORDS = 64
"""Minimum number of words: nodes require this number of tokens, and a word has at least one."""
# Maximum number of bytes that are read to count words.
_READ_BYTES = 1 << 20
# First letter of Thai; like the East Asian scripts after it, Thai has no spaces between words.
_FIRST_WITHOUT_SPACES = "\u0e01"


def find_calibration(path: Path, hashes: HashStore) -> Source:
    """Return the bundle of a calibration file.

    Raises:
        UserError: there is no such file, it is not data, or it has too few words.
    """
    from app.library.data import find_data  # reads rows, which only an export needs

    place = Path(os.path.expanduser(path)).absolute()
    found = find_data(str(place), "--calibration", hashes)
    _count_words(place)
    return found


def check_calibration(path: Path, hashes: HashStore) -> int:
    """Return the number of words in a calibration file; 0: they were not counted.

    Raises:
        UserError: there is no such file, it is not data, or it has too few words.
    """
    from app.library.data import find_data  # reads rows, which only an export needs

    place = Path(os.path.expanduser(path)).absolute()
    find_data(str(place), "--calibration", hashes)
    return _count_words(place)


def _count_words(path: Path) -> int:
    """Return the number of words in the first MiB of a data file; 0 for folders and Parquet.

    Raises:
        UserError: a file of text has fewer than `MIN_WORDS`, or cannot be read.
    """
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return 0
    try:
        with open_regular(path) as file:
            # The limit may fall inside a character, so decoding errors are replaced.
            text = file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", "Name another data file."
        ) from error
    words = sum(map(_count_in, text.split()))
    if words < MIN_WORDS:
        raise UserError(
            f"{path.name} has {words} words; at least {MIN_WORDS} are needed to calibrate with",
            "Name a data file with more text, or calibrate with the run's own data.",
        )
    return words


def _count_in(word: str) -> int:
    """Return the number of words in a text without spaces; in Chinese, Thai etc. of letters.

    >>> _count_in("poem."), _count_in("--"), _count_in("\\u6625\\u7720\\u4e0d")
    (1, 0, 3)
    """
    letters = [letter for letter in word if letter.isalnum()]
    alone = sum(letter >= _FIRST_WITHOUT_SPACES for letter in letters)
    return alone or int(bool(letters))

"""Find rows that are nearly an earlier row, by MinHash over pairs of words.

Two texts are near copies if about 80 % or more of their pairs of neighbouring words are the same,
without case and punctuation at the ends of words. Short rows are near copies only if every word is
the same: rows such as sums differ in one word, and are not copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from agents.errors import ExpectedError

THRESHOLD = 0.8
"""Minimum share of pairs of words that near copies have in common."""
_NUM_HASHES = 128
_AT_ONCE = 4096
_ENDS = ".,;:!?\"'()[]{}*_`"
# Mean length of a word in characters from which a text is taken as one without spaces.
_LONG_WORDS = 15


def list_pairs(text: str) -> list[str]:
    """Return the pairs of words of a text; of characters if its language has no spaces.

    >>> list_pairs("Is it Paris?  Yes."), list_pairs("Hi")
    (['is it', 'it paris', 'paris yes'], ['hi'])
    """
    folded = text.casefold()
    words = [word.strip(_ENDS) or word for word in folded.split()]
    if len(folded) > _LONG_WORDS * len(words):
        words = [sign for sign in folded if not sign.isspace()]
    return [f"{one} {other}" for one, other in pairwise(words)] or words


def find_near_copies(texts: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Return for each text whether it is nearly an earlier one that is none itself (N,).

    Raises:
        ExpectedError: the training environment is of an earlier version.
    """
    try:
        from rensa import RMinHashDeduplicator
    except ImportError as error:
        raise ExpectedError(
            "deduplicate: near needs the package rensa, which this training environment lacks.",
            "Build the environment again, or set deduplicate: exact",
        ) from error
    known = RMinHashDeduplicator(threshold=THRESHOLD, num_perm=_NUM_HASHES, use_lsh=True, seed=1)
    numbered = ((str(number), list_pairs(text)) for number, text in enumerate(texts))
    kept: list[npt.NDArray[np.bool_]] = []
    while some := list(islice(numbered, _AT_ONCE)):
        kept.append(np.array(known.add_pairs(some), dtype=np.bool_))
    return ~np.concatenate(kept) if kept else np.zeros(0, dtype=np.bool_)

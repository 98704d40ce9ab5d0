"""Find an action, a page, a run or a node by a few letters of its name.

Each typed word must match. In order of rank: the start of a word of the title, inside the title, as
initials (`nr` finds New run), in the explanation, or as letters in their order. Equal matches keep
the order of the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_FOUND = 60

_WORD_START, _INSIDE, _INITIALS, _EXPLAINED, _LETTERS = 100.0, 60.0, 45.0, 25.0, 15.0
# A run itself comes before what can be done with it.
_COMMON = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PaletteEntry:
    title: str
    group: str
    """Kind of the entry: action, page, run or node."""
    icon: str = ""
    note: str = ""
    """Note after the title, such as a run's state."""
    shortcut: str = ""
    words: str = ""
    """Extra words that find the entry."""
    is_common: bool = True
    """True if the entry is listed before anything is typed."""


@dataclass(frozen=True, slots=True)
class PaletteMatch:
    index: int
    """Index of the entry among those given."""
    places: tuple[int, ...]
    """Indices of the matching letters of the title, ascending."""


def find_entries(entries: Sequence[PaletteEntry], query: str) -> list[PaletteMatch]:
    """Return the matches of `query`, best first, at most MAX_FOUND.

    >>> titles = ("Add a PC", "New run")
    >>> entries = [PaletteEntry(title=title, group="action") for title in titles]
    >>> find_entries(entries, "nr")
    [PaletteMatch(index=1, places=(0, 4))]
    """
    words = query.lower().split()
    if not words:
        common = [PaletteMatch(index, ()) for index, entry in enumerate(entries) if entry.is_common]
        return common[:MAX_FOUND]
    ranked = []
    for index, entry in enumerate(entries):
        matches = [_match(entry, word) for word in words]
        known = [match for match in matches if match is not None]
        if len(known) == len(words):
            score = sum(score for score, _ in known) + (_COMMON if entry.is_common else 0.0)
            places = sorted({place for _, places in known for place in places})
            ranked.append((-score, index, PaletteMatch(index, tuple(places))))
    # Indices differ, so the sort never compares two matches, which have no order.
    return [found for _, _, found in sorted(ranked)[:MAX_FOUND]]


def _match(entry: PaletteEntry, word: str) -> tuple[float, tuple[int, ...]] | None:
    title = entry.title.lower()
    starts = _starts(title)
    for start in starts:
        if title.startswith(word, start):
            share = len(word) / len(title)  # the shorter title is the better guess
            early = 5.0 if start == 0 else 0.0
            return _WORD_START + early + share, tuple(range(start, start + len(word)))
    place = title.find(word)
    # A single letter occurs inside nearly every title and says nothing.
    if place >= 0 and len(word) > 1:
        return _INSIDE, tuple(range(place, place + len(word)))
    places = _letters(title, word, starts)
    if places is not None and set(places) <= set(starts):
        return _INITIALS, places
    explained = f"{entry.words} {entry.note} {entry.group}".lower()
    if any(explained.startswith(word, start) for start in _starts(explained)):
        return _EXPLAINED, ()
    if places is None:
        return None
    # The closer together the letters are, the better the guess.
    return _LETTERS - (places[-1] - places[0]) / len(title), places


def _starts(text: str) -> list[int]:
    # At 0 the slice is empty, and an empty text is not alphanumeric.
    return [
        at for at, letter in enumerate(text) if letter.isalnum() and not text[at - 1 : at].isalnum()
    ]


def _letters(title: str, word: str, starts: Sequence[int]) -> tuple[int, ...] | None:
    """Return the indices at which the letters of `word` match in order, preferring word starts."""
    for first in starts:
        if title[first] != word[0]:
            continue
        places = [first]
        for letter in word[1:]:
            last = places[-1]
            after = next((s for s in starts if s > last and title[s] == letter), -1)
            # The next letter of the same word beats the start of another one.
            if title[last + 1 : last + 2] == letter:
                after = last + 1
            elif after < 0:
                after = title.find(letter, last + 1)
            if after < 0:
                break
            places.append(after)
        if len(places) == len(word):
            return tuple(places)
    return None

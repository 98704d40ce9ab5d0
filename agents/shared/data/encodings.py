"""Guess the encoding of a text file that is not UTF-8.

A guess is only offered: a file is read in another encoding once the user has set it. Of the usual
encodings, the first counts by which enough of the characters are letters that its languages write
most.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from agents.shared.files.folder_files import open_regular

_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_GUESSED_BYTES = 1 << 20
_START_BYTES = 1 << 12
_MIN_ZEROS = 0.2
"""Share of zero bytes above which a text has two bytes per character."""
_MAX_RUN_BYTES = 1.6
"""Mean number of neighboring bytes beyond ASCII in languages with a Latin alphabet."""
_MAX_CUT_BYTES = 4
# Letters of whole languages, by which encodings with one byte per character are told apart.
_SIGNS = "\u201c\u201d\u201e\u2018\u2019\u2013\u2026\xab\xbb\xa0"
_WESTERN = (
    "\xe0\xe2\xe7\xe8\xe9\xea\xeb\xee\xef\xf4\xf9\xfb\xfc\u0153",  # French
    "\xe0\xe8\xe9\xec\xf2\xf9",  # Italian
    "\xe1\xe9\xed\xf3\xfa\xf1\xfc\xbf\xa1",  # Spanish
    "\xe0\xe1\xe2\xe3\xe7\xe9\xea\xed\xf3\xf4\xf5\xfa",  # Portuguese
    "\xe4\xf6\xfc\xdf",  # German
    "\xe4\xe5\xe6\xe9\xf6\xf8",  # Nordic
)
_CENTRAL = (
    "\u0105\u0107\u0119\u0142\u0144\xf3\u015b\u017a\u017c",  # Polish
    "\xe1\u010d\u010f\xe9\u011b\xed\u0148\xf3\u0159\u0161\u0165\xfa\u016f\xfd\u017e",  # Czech
    "\xe1\xe4\u010d\u010f\xe9\xed\u013e\u0148\xf3\xf4\u0161\u0165\xfa\xfd\u017e",  # Slovak
    "\xe1\xe9\xed\xf3\xf6\u0151\xfa\xfc\u0171",  # Hungarian
    "\u0103\xe2\xee\u015f\u0163",  # Romanian
    "\u010d\u0107\u0111\u0161\u017e",  # Croatian
)
# The most usual small letters: the other Cyrillic encoding reads them as capitals.
_CYRILLIC = ("\u0430\u0432\u0435\u0438\u043b\u043d\u043e\u0440\u0441\u0442\u0456",)
_ALPHABETS = (
    (("cp1252", _WESTERN), ("cp1250", _CENTRAL), ("iso8859_2", _CENTRAL)),
    (("cp1251", _CYRILLIC), ("koi8_r", _CYRILLIC)),
)
"""Encodings by alphabet, each with the letters of its languages."""
_ENOUGH = (0.8, 0.5)
"""Share of these among the characters beyond ASCII that is enough, by alphabet."""
# Encoding, first bytes of its most usual characters, and the share of these that is enough. The
# order matters, since texts of one are often valid in the next.
_USUAL = (
    ("shift_jis", (0x82, 0x83), 0.25),  # kana
    ("euc_jp", (0xA4, 0xA5), 0.25),
    ("euc_kr", tuple(range(0xB0, 0xC9)), 0.9),  # hangul, by which half of Chinese is valid
    ("gb18030", tuple(range(0xB0, 0xD8)), 0.5),  # its 3,755 most usual characters
    ("big5", tuple(range(0xA4, 0xC7)), 0.5),
)


class NotUtf8(ValueError):
    """Raised for a text with bytes that are not UTF-8."""


def offer_encoding(path: Path) -> str:
    """Return the key that reads a file, ready to paste; empty: it is UTF-8, or not known.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        found = guess_encoding(file.read(_GUESSED_BYTES))
    return f"data.encoding: {found}" if found else ""


def guess_encoding(start: bytes) -> str:
    r"""Return the likely encoding of a text by Python's name; empty: UTF-8, or not known.

    >>> text = "d\N{LATIN SMALL LETTER E WITH ACUTE}j\N{LATIN SMALL LETTER A WITH GRAVE} vu, encore"
    >>> [guess_encoding(text.encode(name)) for name in ("utf-8", "cp1252", "utf-16-be")]
    ['', 'cp1252', 'utf-16-be']
    """
    if wide := guess_utf16(start):
        return wide
    if _decodes(start, "utf-8") is not None:
        return ""
    beyond = bytes(byte if byte > 0x7F else 0x20 for byte in start).split()
    mean_bytes = sum(map(len, beyond)) / max(1, len(beyond))
    for name, usual, share in _USUAL if mean_bytes > _MAX_RUN_BYTES else ():
        text = _decodes(start, name)
        letters = [one.encode(name) for one in text or "" if one > "\x7f"]
        if letters and sum(one[0] in usual for one in letters) >= share * len(letters):
            return name
    for alphabet, enough in zip(_ALPHABETS, _ENOUGH, strict=True):
        shares = {name: _count_letters(start, name, letters) for name, letters in alphabet}
        best = max(shares, key=lambda name: shares[name])
        # Lithuanian has single letters, of which many are Cyrillic ones.
        if shares[best] >= enough and (alphabet is _ALPHABETS[0] or mean_bytes > _MAX_RUN_BYTES):
            return best
    return ""


def _count_letters(start: bytes, encoding: str, languages: Sequence[str]) -> float:
    """Return the share of characters beyond ASCII that the best of the languages writes."""
    text = _decodes(start, encoding) or ""
    if languages is not _CYRILLIC:
        text = text.lower()
    counts = Counter(one for one in text if one > "\x7f")
    # Greek reads as Cyrillic with capitals within words.
    if sum(one.islower() and two.isupper() for one, two in pairwise(text)) > counts.total() / 50:
        return 0.0
    usual = (sum(counts[one] for one in {*letters, *_SIGNS}) for letters in languages)
    return max(usual) / max(1, counts.total())


def guess_utf16(start: bytes) -> str:
    """Return the kind of UTF-16 by its mark, or by where its zero bytes are; empty: another.

    >>> guess_utf16("[1]".encode("utf-16-le")), guess_utf16(b"[1]")
    ('utf-16-le', '')
    """
    marked = next((name for mark, name in _UTF16.items() if start.startswith(mark)), "")
    begin = start[:_START_BYTES]
    high, low = begin[::2].count(0), begin[1::2].count(0)
    if marked or max(high, low) * 2 <= _MIN_ZEROS * len(begin):
        return marked or _guess_wide(begin)
    return ("utf-16-be" if high > low else "utf-16-le") if min(high, low) < len(begin) / 20 else ""


def _guess_wide(begin: bytes) -> str:
    """Return UTF-16 of a text with few Latin letters, by its line ends and blanks."""
    if _decodes(begin, "utf-8") is not None:
        return ""  # it merely has a zero byte
    pairs = Counter(zip(begin[::2], begin[1::2], strict=False))
    small = sum(pairs[sign, 0] for sign in b"\n "), sum(pairs[0, sign] for sign in b"\n ")
    name = "utf-16-le" if small[0] > small[1] else "utf-16-be"
    return name if small[0] != small[1] and _decodes(begin, name) is not None else ""


def _decodes(start: bytes, encoding: str) -> str | None:
    """Return the text of the bytes, of which the last character may be cut, or None."""
    try:
        return start.decode(encoding)
    except UnicodeDecodeError as error:
        if error.start + _MAX_CUT_BYTES <= len(start) or error.start == 0:
            return None
        return start[: error.start].decode(encoding)

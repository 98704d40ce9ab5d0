"""Guess the encoding of a text file that is not UTF-8.

A guess is only offered: a file is read in another encoding once the user has set it. Of the usual
encodings, the first counts by which enough of the characters are letters that its languages write
most.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from agents.shared.files.folder_files import open_regular

_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_GUESSED_BYTES = 1 << 20
_START_BYTES = 1 << 12
_MIN_ZEROS = 0.2
"""Share of zero bytes above which a text has two bytes per character."""
_MAX_RUN_BYTES = 1.6
"""Mean number of neighboring bytes beyond ASCII in languages with a Latin alphabet."""
_MAX_WORD_BYTES = 3
"""The same, but a language such as German may have two next to each other."""
_MAX_CUT_BYTES = 4
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
    if mean_bytes > _MAX_WORD_BYTES:
        return "cp1251" if _decodes(start, "cp1251") is not None else ""
    return next((one for one in ("cp1252", "cp1250") if _decodes(start, one) is not None), "")


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
    wide = {"utf-16-le": (b"\n\0", b" \0"), "utf-16-be": (b"\0\n", b"\0 ")}
    found = [name for name, signs in wide.items() if any(sign in begin for sign in signs)]
    return found[0] if len(found) == 1 and _decodes(begin, found[0]) is not None else ""


def _decodes(start: bytes, encoding: str) -> str | None:
    """Return the text of the bytes, of which the last character may be cut, or None."""
    try:
        return start.decode(encoding)
    except UnicodeDecodeError as error:
        if error.start + _MAX_CUT_BYTES <= len(start) or error.start == 0:
            return None
        return start[: error.start].decode(encoding)

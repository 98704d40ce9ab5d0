"""Lines, words and patterns of `~/.ssh/config`, split and compared as OpenSSH does."""

from __future__ import annotations

import re

# A keyword may be quoted, and blanks or one equals sign stand between it and its value.
_KEYWORD = re.compile(r'[ \t\r\f]*"?([^\s"=]+)"?(?:[ \t]*=[ \t]*|[ \t]+|$)(.*)', re.DOTALL)


def split_keyword(line: str) -> tuple[str, str]:
    """Return the keyword of a line and the rest; both empty: the line is blank or a comment.

    >>> split_keyword("  Port = 22 # usual ")
    ('Port', '22 # usual')
    """
    match = _KEYWORD.match(line.rstrip(" \t\r\f"))
    if match is None or match[1].startswith("#"):
        return "", ""
    return match[1], match[2]


def split_words(text: str) -> list[str]:
    r"""Split as OpenSSH's argv_split: quotes group, a `#` begins a comment, and a backslash is
    itself unless it stands before a quote, a backslash or a blank. Empty: a quote does not end.

    >>> split_words(r'"a b" C:\keys\one # mine')
    ['a b', 'C:\\keys\\one']
    """
    words: list[str] = []
    place = 0
    while place < len(text):
        if text[place] in " \t":
            place += 1
            continue
        if text[place] == "#":
            break
        word, place = _take_word(text, place)
        if word is None:
            return []
        words.append(word)
    return words


def _take_word(text: str, place: int) -> tuple[str | None, int]:
    """Return the word that begins at `place`, and the place behind it; None: no end quote."""
    word, quote = "", ""
    while place < len(text) and (quote or text[place] not in " \t"):
        letter, after = text[place], text[place + 1 : place + 2]
        escapable = ("'", '"', "\\") if quote else ("'", '"', "\\", " ")
        if letter == "\\" and after in escapable:
            word += after
            place += 1
        elif not quote and letter in "\"'":
            quote = letter
        elif letter == quote:
            quote = ""
        else:
            word += letter
        place += 1
    return (None if quote else word), place


def match_pattern(text: str, pattern: str) -> bool:
    """Return whether a pattern with `*` and `?` fits the whole text.

    >>> match_pattern("gpu-7", "gpu-?"), match_pattern("gpu-17", "gpu-?")
    (True, False)
    """
    wild = {"*": ".*", "?": "."}
    regex = "".join(wild.get(letter) or re.escape(letter) for letter in pattern)
    return re.fullmatch(regex, text, re.DOTALL) is not None


def match_list(text: str, patterns: str) -> bool:
    """Return whether one of the patterns between commas fits, and none of those after a `!`.

    >>> match_list("gpu-7", "gpu-*,!gpu-7")
    False
    """
    parts = patterns.split(",")
    if any(part.startswith("!") and match_pattern(text, part[1:]) for part in parts):
        return False
    return any(not part.startswith("!") and match_pattern(text, part) for part in parts)

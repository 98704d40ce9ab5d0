"""Set keys in a user's `.wslconfig` and keep every other byte.

The file is read as WSL reads it (src/shared/configfile/configfile.cpp of microsoft/WSL): names are
compared without case, the first line of a key counts and later ones are ignored with a warning, `#`
begins a comment outside quotes, and a backslash at the end continues a value in the next line.
`resources/windows/node.ps1` does the same in PowerShell; the tests compare both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_HEADER = re.compile(r"[ \t]*\[([A-Za-z][A-Za-z0-9]*)\][ \t]*(?:#[^\r\n]*)?[\r\n]*")
_ENTRY = re.compile(r"([ \t]*([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*)([^\r\n]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class WslSetting:
    """One key that `.wslconfig` should have."""

    section: str
    key: str
    value: str
    older_sections: tuple[str, ...] = ()
    """Sections in which WSL reads the same key for compatibility; a line there also counts."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{one}.{self.key}" for one in (self.section, *self.older_sections))


def merge(text: str, settings: Iterable[WslSetting]) -> str:
    """Return the text with all settings in it; unchanged if it has them.

    >>> print(merge("[wsl2]\\nmemory=8GB # enough\\n", [WslSetting(section="wsl2", key="memory",
    ... value="24GB")]), end="")
    [wsl2]
    memory=24GB # enough
    """
    for setting in settings:
        text = _set(text, setting)
    return text


def read_value(text: str, setting: WslSetting) -> str | None:
    """Return the value that WSL reads for the key of a setting, or None if it is not set."""
    lines = _LINE.findall(text)
    _, found = _find(lines, setting)
    if found is None:
        return None
    first, last, entry = found
    return _value_of(entry[3]) if first == last else ""


def decode(data: bytes) -> tuple[bytes, str, str]:
    """Return the byte order mark of a file, its encoding, and its text.

    UTF-8 if valid, else Latin-1, which keeps every byte. PowerShell 5.1 writes UTF-16 when output
    is redirected into a file, and WSL recognises that by its mark.
    """
    if data.startswith(b"\xff\xfe"):
        # surrogatepass keeps damaged pairs, so that they are written back unchanged.
        return b"\xff\xfe", "utf-16-le", data[2:].decode("utf-16-le", "surrogatepass")
    mark = b"\xef\xbb\xbf" if data.startswith(b"\xef\xbb\xbf") else b""
    body = data[len(mark) :]
    try:
        return mark, "utf-8", body.decode("utf-8")
    except UnicodeDecodeError:
        return mark, "latin-1", body.decode("latin-1")


def merge_bytes(data: bytes, settings: Iterable[WslSetting]) -> bytes:
    """Return a file's bytes with all settings in them, in its own encoding and line ends."""
    mark, encoding, text = decode(data)
    return mark + merge(text, settings).encode(encoding, "surrogatepass")


def _set(text: str, setting: WslSetting) -> str:
    lines = _LINE.findall(text)
    place, found = _find(lines, setting)
    if found is not None:
        first, last, entry = found
        rest = entry[3]
        if first == last and _value_of(rest).lower() == setting.value.lower():
            return text
        comment = _comment_of(rest) if first == last else ""
        line = entry[1] + setting.value + comment + _end_of(lines[last])
        return "".join((*lines[:first], line, *lines[last + 1 :]))
    # A new file gets the line ends of Windows.
    newline = "\r\n" if "\r\n" in text or "\n" not in text else "\n"
    if lines and place in (None, len(lines) - 1):
        lines[-1] += "" if _end_of(lines[-1]) else newline
        # Otherwise a backslash at the very end would continue into our line.
        lines[-1] += newline if _is_continued(lines[-1]) else ""
    line = f"{setting.key}={setting.value}{newline}"
    if place is not None:
        return "".join((*lines[: place + 1], line, *lines[place + 1 :]))
    gap = newline if lines and lines[-1].strip() else ""
    return "".join((*lines, gap, f"[{setting.section}]{newline}", line))


def _find(
    lines: list[str], setting: WslSetting
) -> tuple[int | None, tuple[int, int, re.Match[str]] | None]:
    """Return the line after which a new key goes, and the first and last line of the one there."""
    names = {name.lower() for name in setting.names}
    section, place, index = "", None, 0
    while index < len(lines):
        header, entry = _HEADER.fullmatch(lines[index]), _ENTRY.match(lines[index])
        if header is not None:
            section = header[1].lower()
            place = index if section == setting.section.lower() else place
        elif entry is not None:
            last = index
            is_continued = _split(entry[3])[1]
            while is_continued and last + 1 < len(lines):
                last += 1
                is_continued = _split(lines[last].rstrip("\r\n"))[1]
            if f"{section}.{entry[2]}".lower() in names:
                return place, (index, last, entry)
            place = last if section == setting.section.lower() else place
            index = last
        index += 1
    return place, None


def _split(rest: str) -> tuple[int, bool]:
    """Return the start of the comment after a value, and True if the next line continues the
    value.
    """
    is_quoted = is_escaped = False
    for index, char in enumerate(rest):
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == '"':
            is_quoted = not is_quoted
        elif char == "#" and not is_quoted:
            return index, False
    return len(rest), is_escaped


def _is_continued(line: str) -> bool:
    is_comment = line.lstrip(" \t").startswith("#")
    return not is_comment and _split(line.rstrip("\r\n"))[1]


def _value_of(rest: str) -> str:
    return rest[: _split(rest)[0]].strip(" \t").strip('"')


def _comment_of(rest: str) -> str:
    """Return the comment after a value, with the space before it."""
    value = rest[: _split(rest)[0]].rstrip(" \t")
    return rest[len(value) :]


def _end_of(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]

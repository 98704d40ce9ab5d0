"""Read the metadata of an untrusted GGUF file, without its weights.

Every count and length is checked against the remaining bytes before anything is read or reserved
for it, so time and memory are bounded by the file and by a fixed limit.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from agents.shared.files.folder_files import open_regular

MAX_METADATA_BYTES = 256 << 20
"""Maximum size of the keys and values, in bytes. A vocabulary of 260,000 words takes about 10
MB."""
MAX_KEYS = 1 << 16
MAX_ITEMS = 1 << 23
"""Maximum number of items of all arrays together."""
# Formats of `struct` by the number of the value type in the file.
_PLAIN = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
# Version 1 had 32-bit counts; its files are no longer in use.
_VERSIONS = (2, 3)
# Minimum size of a key with its value: an empty name, a type and one byte.
_LEAST_KEY_BYTES = 13
_LEAST_STRING_BYTES = 8
# Keys are ASCII words with dots; llama.cpp's longest has 60 characters.
_MAX_KEY_BYTES = 1 << 16


class UnknownVersion(ValueError):
    """Raised for a file of an unsupported version."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the file's keys and values.

    Raises:
        ValueError: it is not a GGUF file, is truncated, or has invalid content.
        UnknownVersion: it has another version.
        OSError: it cannot be read.
    """
    with open_regular(path, path.parent) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            return _Metadata(file, min(size_bytes, MAX_METADATA_BYTES)).read()
        except UnknownVersion:
            raise
        except ValueError as error:
            raise ValueError(f"{path} is not a whole GGUF file: {error}") from error


class _Metadata:
    """Beginning of a file, of which at most `left` bytes are read."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file = file
        self._left = left
        self._items_left = MAX_ITEMS

    def read(self) -> dict[str, Any]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnknownVersion(f"a GGUF file of version {version} is not known")
        self._number("Q")  # number of tensors, whose descriptions follow the keys
        num_keys = self._number("Q")
        if num_keys > min(MAX_KEYS, self._left // _LEAST_KEY_BYTES):
            raise ValueError(f"it cannot hold {num_keys} keys")
        found: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text(_MAX_KEY_BYTES)
            if key in found:
                raise ValueError(f"it has the key {key[:80]!r} twice")
            found[key] = self._value(self._number("I"))
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text(self._left)
        if kind == _ARRAY:
            return self._array()
        return self._number(_form(kind))

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError("it has arrays within arrays, which llama.cpp does not read")
        form = "" if kind == _STRING else _form(kind)
        least = struct.calcsize(f"<{form}") if form else _LEAST_STRING_BYTES
        if count > min(self._items_left, self._left // least):
            raise ValueError(f"it cannot hold an array of {count} items")
        self._items_left -= count
        if not form:
            return [self._text(self._left) for _ in range(count)]
        return list(struct.unpack(f"<{count}{form}", self._take(count * least)))

    def _text(self, most_bytes: int) -> str:
        length = self._number("Q")
        if length > most_bytes:
            raise ValueError(f"it cannot hold a text of {length} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))
        return value

    def _take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes) if num_bytes <= self._left else b""
        if len(data) < num_bytes:
            raise ValueError("it is truncated within its metadata")
        self._left -= num_bytes
        return data


def _form(kind: int) -> str:
    if kind not in _PLAIN:
        raise ValueError(f"value type {kind} is not known")
    return _PLAIN[kind]

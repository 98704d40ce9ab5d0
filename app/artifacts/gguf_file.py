"""Read what a GGUF file says of itself, without its weights.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from agents.contract.folder_files import open_regular

_PLAIN = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Longer texts are no texts of a model.
_MOST_BYTES = 64 << 20


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the file's keys and values.

    Raises:
        ValueError: it is no GGUF file, or is cut.
        OSError: it cannot be read.
    """
    with open_regular(path, path.parent) as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        try:
            _, _, count = struct.unpack("<IQQ", file.read(20))
            return {_read_string(file): _read_value(file, _read(file, "<I")) for _ in range(count)}
        except struct.error as error:
            raise ValueError(f"{path} is truncated within its metadata") from error


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind == _ARRAY:
        inner, count = _read(file, "<I"), _read(file, "<Q")
        return [_read_value(file, inner) for _ in range(count)]
    if kind not in _PLAIN:
        raise ValueError(f"value type {kind} is not known")
    return _read(file, _PLAIN[kind])


def _read_string(file: BinaryIO) -> str:
    length = _read(file, "<Q")
    if length > _MOST_BYTES:
        raise ValueError(f"a text of {length} bytes is too long")
    return file.read(length).decode("utf-8", "replace")


def _read(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]

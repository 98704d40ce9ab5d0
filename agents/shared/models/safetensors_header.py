"""Read the header of a safetensors file, which lists its tensors, without reading the tensors.

The file is untrusted: the length of the header, its JSON, and the type, shape and position of every
tensor are checked against the size of the file. The rules are those of the format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, in bytes, as in the library's own reader."""
MAX_TENSORS = 500_000
"""Maximum number of tensors of a model; DeepSeek-V3 has 91,000."""
MAX_DIMS = 64
"""Maximum number of dimensions of a tensor, as in PyTorch."""
_MAX_SIZE = 2**63 - 1
_LENGTH_BYTES = 8
# Brackets allowed beyond the three of each tensor, since metadata may quote JSON.
_SPARE_BRACKETS = 100_000
_MAX_SHOWN = 60
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Number of bits of one value, by the name of its type."""


class HeaderError(ValueError):
    """Raised when a file is not a safetensors file, or is damaged; the text begins with a verb."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    dtype: str
    """Name of its type, one of `BITS`."""
    shape: tuple[int, ...]


def read_header(file: BinaryIO) -> dict[str, TensorInfo]:
    """Return the tensors of an open safetensors file by name.

    Raises:
        HeaderError: the file has another format, is truncated, or is inconsistent.
        OSError: it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    data_bytes = size - _LENGTH_BYTES - length
    if size < _LENGTH_BYTES + 2:
        raise HeaderError(f"has {size} bytes, too few for a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(
            f"claims a header of {length:,} bytes, and at most {MAX_HEADER_BYTES:,} are allowed"
        )
    if data_bytes < 0:
        raise HeaderError(f"ends in its header, after {size:,} bytes")
    raw = file.read(length)
    return parse_header(raw, data_bytes)


def parse_header(raw: bytes, data_bytes: int) -> dict[str, TensorInfo]:
    """Return the tensors listed in a header, in the order of the file.

    Args:
        raw: JSON of the header.
        data_bytes: size of the file after its header.

    Raises:
        HeaderError: it is invalid, or does not match the size.
    """
    entries = _parse_json(raw)
    entries.pop("__metadata__", None)  # never used here
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        tensors[name], start, end = _read_entry(name, entry)
        spans.append((start, end, name))
    _require_gapless(spans, data_bytes)
    return tensors


def _parse_json(raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise HeaderError("has a header that is not a JSON object")
    # Millions of empty lists would take a hundred times the file's size in memory.
    if raw.count(b"[") + raw.count(b"{") > 3 * raw.count(b'"data_offsets"') + _SPARE_BRACKETS:
        raise HeaderError("has a header with more lists than its tensors need")
    try:
        entries = json.loads(raw, object_pairs_hook=_refuse_doubles)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"has a header that is not JSON: {str(error)[:80]}") from error
    if not isinstance(entries, dict):
        raise HeaderError("has a header that is not a JSON object")
    if len(entries) > MAX_TENSORS:
        raise HeaderError(f"names {len(entries):,} tensors; at most {MAX_TENSORS:,} are allowed")
    return entries


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise HeaderError(f"names {_shown(twice)} twice in its header")
    return found


def _read_entry(name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """Return a tensor, the offset of its first byte, and the offset after its last one."""
    if not isinstance(entry, Mapping):
        raise HeaderError(f"describes {_shown(name)} not by a JSON object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise HeaderError(f"has {_shown(name)} in the unknown type {_shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise HeaderError(f"has {_shown(name)} with the impossible shape {_shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"has {_shown(name)} at the impossible place {_shown(offsets)}")
    bits = BITS[dtype] * _product(name, shape)
    # Compared in bits: values of F4 and F6 do not fill bytes.
    if bits != 8 * (offsets[1] - offsets[0]):
        raise HeaderError(
            f"has {offsets[1] - offsets[0]:,} bytes for {_shown(name)}, and {dtype} of shape "
            f"{_shown(shape)} takes {bits / 8:,.0f}"
        )
    return TensorInfo(dtype, tuple(shape)), offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= _MAX_SIZE for size in value
    )


def _product(name: str, shape: list[int]) -> int:
    """Return the number of values, stopping before the product gets too long."""
    total = 1
    for size in shape:
        total *= size
        if total > _MAX_SIZE:
            raise HeaderError(f"has {_shown(name)} with the impossible shape {_shown(shape)}")
    return total


def _require_gapless(spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    # Sorted by start: each tensor must begin where the previous one ends.
    spans.sort()
    for (_, end, _), (start, _, name) in pairwise([(0, 0, ""), *spans]):
        if start != end:
            what = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise HeaderError(f"has a header in which {_shown(name)} {what}")
    needed = spans[-1][1] if spans else 0
    if needed > data_bytes:
        raise HeaderError(
            f"is cut off: its tensors take {needed:,} bytes, and only {data_bytes:,} are there"
        )
    if needed < data_bytes:
        raise HeaderError(f"has {data_bytes - needed:,} bytes that belong to no tensor")


def _shown(value: Any) -> str:
    value = value[:8] if isinstance(value, list) else value
    text = value[:200] if isinstance(value, str) else json.dumps(value, default=str)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."

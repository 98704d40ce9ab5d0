"""Files as lists of hashed chunks, which are transferred and verified one by one.

Chunks have one fixed size, so the list of a file depends on its content alone, and master and nodes
compute the same list. A file whose chunks all match the list is identical to the hashed file, so it
need not be read again as a whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 4 << 20
"""Size of a chunk, in bytes. A killed transfer repeats at most one chunk, and each node of a chain
waits for one chunk before it forwards any. From 1 to 16 MiB the CPU time per byte is the same (2.1
ns to receive); larger chunks delay the last node, smaller ones make longer lists."""
DIGEST_CHARACTERS = 64
_HEX = re.compile(r"(?:[0-9a-f]{64})*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedFile:
    """Content of a file, by which it is found and verified; file names are stored elsewhere."""

    size_bytes: int
    sha256: str
    """SHA-256 of the whole file, in hex."""
    chunks: str
    """SHA-256 of each chunk, in hex, concatenated."""

    def check_foreign(self) -> None:
        if self.size_bytes < 0 or not _HEX.fullmatch(self.chunks):
            raise ValueError(f"{self.chunks[:80]!a} is not a list of chunks")
        if len(self.sha256) != DIGEST_CHARACTERS or not _HEX.fullmatch(self.sha256):
            raise ValueError(f"{self.sha256[:80]!a} is not a SHA-256")
        if len(self.chunks) != DIGEST_CHARACTERS * num_chunks(self.size_bytes):
            raise ValueError(f"a file of {self.size_bytes} bytes has another number of chunks")


def num_chunks(size_bytes: int) -> int:
    """Return the number of chunks of a file.

    >>> num_chunks(0), num_chunks(1), num_chunks(CHUNK_BYTES), num_chunks(CHUNK_BYTES + 1)
    (0, 1, 1, 2)
    """
    # Ceiling division in whole numbers.
    return -(-size_bytes // CHUNK_BYTES)


def hash_chunks(file: BinaryIO) -> ChunkedFile:
    """Read a file to its end and return its size and hashes, using two cores.

    Raises:
        OSError: it cannot be read.
    """
    whole, digests, size_bytes = hashlib.sha256(), "", 0
    with ThreadPoolExecutor(1) as other:
        while chunk := file.read(CHUNK_BYTES):
            # Both digests release the interpreter, so they run at the same time.
            updated = other.submit(whole.update, chunk)
            digests += hashlib.sha256(chunk).hexdigest()
            size_bytes += len(chunk)
            updated.result()
    return ChunkedFile(size_bytes=size_bytes, sha256=whole.hexdigest(), chunks=digests)


def describe_small(size_bytes: int, sha256: str) -> ChunkedFile | None:
    """Return a file of at most one chunk, whose list follows from its hash, or None if it is
    larger.
    """
    if size_bytes > CHUNK_BYTES:
        return None
    return ChunkedFile(size_bytes=size_bytes, sha256=sha256, chunks=sha256 if size_bytes else "")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a list of files."""

    file: int
    """Index of the file."""
    offset: int
    """Position in the file, in bytes."""
    size_bytes: int
    sha256: str


def list_chunks(files: Sequence[ChunkedFile]) -> list[Chunk]:
    """Return the chunks of all files, in order; an index is the chunk's number in a transfer."""
    return [chunk for index, file in enumerate(files) for chunk in _chunks_of(index, file)]


def _chunks_of(index: int, file: ChunkedFile) -> Iterator[Chunk]:
    for number in range(num_chunks(file.size_bytes)):
        offset, digit = number * CHUNK_BYTES, number * DIGEST_CHARACTERS
        size_bytes = min(CHUNK_BYTES, file.size_bytes - offset)
        yield Chunk(index, offset, size_bytes, file.chunks[digit : digit + DIGEST_CHARACTERS])


def to_bitmap(numbers: Iterable[int]) -> str:
    """Return a set of chunk numbers as text.

    >>> to_bitmap([0, 2, 9]), sorted(from_bitmap("0205")), from_bitmap("")
    ('0205', [0, 2, 9], set())
    """
    data = bytearray()
    for number in numbers:
        data.extend(bytes(max(0, number // 8 + 1 - len(data))))
        data[number // 8] |= 1 << number % 8
    # Most significant byte first, so that the text is the bitmap as a hexadecimal number.
    return data[::-1].hex()


def from_bitmap(text: str) -> set[int]:
    """Return the chunk numbers in the text of `to_bitmap`.

    Raises:
        ValueError: the text is not hexadecimal.
    """
    data = bytes.fromhex(text)[::-1]
    return {
        8 * i + bit for i, byte in enumerate(data) if byte for bit in range(8) if byte >> bit & 1
    }

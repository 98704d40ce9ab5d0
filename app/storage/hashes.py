"""Cache of file hashes, so that a model is not read in full at every start.

A file counts as unchanged while its size and modification time are the same. The chunks of large
files, in which they are sent to nodes, are hashed in the same pass and stored by the file's hash.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from agents.contract.chunks import CHUNK_BYTES, ChunkedFile, hash_chunks
from agents.shared.files.folder_files import open_regular
from app.storage.database import Database


class HashStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def sha256(self, path: Path) -> str:
        """Return the SHA-256 of a file, cached while it is unchanged; may read for minutes."""
        stat = path.stat()
        rows = self._database.read(
            "SELECT sha256 FROM file_hashes WHERE path = ? AND size_bytes = ? AND modified_ns = ?",
            (str(path), stat.st_size, stat.st_mtime_ns),
        )
        if rows:
            return str(rows[0][0])
        is_large = stat.st_size > CHUNK_BYTES
        value = self._hash_chunks(path).sha256 if is_large else hash_file(path)
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?, ?)",
                (str(path), stat.st_size, stat.st_mtime_ns, value),
            )
        return value

    def chunks(self, path: Path, sha256: str) -> ChunkedFile:
        """Return the stored chunks of the file with this hash, else those of `path` now.

        Raises:
            OSError: it cannot be read.
        """
        rows = self._database.read(
            "SELECT size_bytes, chunks FROM chunk_lists WHERE sha256 = ?", (sha256,)
        )
        if rows:
            size_bytes, chunks = rows[0]
            return ChunkedFile(size_bytes=int(size_bytes), sha256=sha256, chunks=str(chunks))
        return self._hash_chunks(path)

    def _hash_chunks(self, path: Path) -> ChunkedFile:
        with open_regular(path) as file:
            found = hash_chunks(file)
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO chunk_lists VALUES (?, ?, ?)",
                (found.sha256, found.size_bytes, found.chunks),
            )
        return found


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

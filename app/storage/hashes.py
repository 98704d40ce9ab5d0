"""SHA-256 of files that were hashed before, so that a model is not read whole at each start.

A file counts as unchanged while its size and modification time are.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from app.storage.database import Database


class HashStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def sha256(self, path: Path) -> str:
        """Return the hash of a file, from memory when it has not changed. May read for minutes."""
        stat = path.stat()
        rows = self._database.read(
            "SELECT sha256 FROM file_hashes WHERE path = ? AND size_bytes = ? AND modified_ns = ?",
            (str(path), stat.st_size, stat.st_mtime_ns),
        )
        if rows:
            return str(rows[0][0])
        value = hash_file(path)
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?, ?)",
                (str(path), stat.st_size, stat.st_mtime_ns, value),
            )
        return value


def hash_file(path: Path) -> str:
    """Read a file whole and return its SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

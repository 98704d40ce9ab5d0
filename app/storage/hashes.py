"""Cache of file hashes, so that a model is not read completely at every start.

A file counts as unchanged while its size and modification time are the same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from agents.contract.folder_files import open_regular
from app.storage.database import Database


class HashStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def sha256(self, path: Path) -> str:
        """Return the SHA-256 of a file, cached while the file is unchanged. May read for
        minutes.
        """
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
    """Return the SHA-256 of a file in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Store of artifacts and their copies. An artifact stays when its run is deleted.

The hashes of its files are those at registration; every copy is verified against them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from agents.contract.messages import from_wire, to_wire
from agents.contract.run import FileEntry
from agents.contract.wire import ForeignValueError
from app.artifact import ArtifactCopy, ArtifactSnapshot, CopyKind, CopyState
from app.storage.database import Database

_COPY_COLUMNS = "kind, place, path, made_s, checked_s, state, problem"


class ArtifactStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> tuple[ArtifactSnapshot, ...]:
        """Return every artifact, newest first."""
        return self._find("", ())

    def versions(self, name: str) -> tuple[ArtifactSnapshot, ...]:
        """Return the versions of a name, newest first."""
        return self._find("WHERE name = ? ", (name,))

    def find_content(self, files: Sequence[FileEntry]) -> ArtifactSnapshot | None:
        """Return the artifact that has exactly these files."""
        found = self._find("WHERE content_sha256 = ? ", (content_sha256(files),))
        return found[0] if found else None

    def add(self, artifact: ArtifactSnapshot) -> ArtifactSnapshot:
        """Insert an artifact as the next version of its name; return it with its version."""
        with self._database.write() as connection:
            (newest,) = connection.execute(
                "SELECT coalesce(max(version), 0) FROM artifacts WHERE name = ?", (artifact.name,)
            ).fetchone()
            added = replace(artifact, version=newest + 1)
            connection.execute(
                "INSERT INTO artifacts VALUES (?, ?, ?, ?, ?, ?)",
                (
                    added.name,
                    added.version,
                    content_sha256(added.files),
                    json.dumps(to_wire(replace(added, copies=(), measured=None))),
                    None if added.measured is None else json.dumps(added.measured),
                    added.created_s,
                ),
            )
        for copy in added.copies:
            self.save_copy(added, copy)
        return added

    def save_copy(self, artifact: ArtifactSnapshot, copy: ArtifactCopy) -> None:
        """Store a copy or its new state, in place of another artifact's copy at its location."""
        with self._database.write() as connection:
            if copy.kind != "node":  # on a node each artifact has its own folder
                connection.execute(
                    "DELETE FROM artifact_copies WHERE kind = ? AND place = ? "
                    "AND NOT (name = ? AND version = ?)",
                    (copy.kind, copy.place, artifact.name, artifact.version),
                )
            connection.execute(
                "INSERT OR REPLACE INTO artifact_copies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    artifact.name,
                    artifact.version,
                    copy.kind,
                    copy.place,
                    copy.path,
                    copy.made_s,
                    copy.checked_s,
                    copy.state,
                    copy.problem,
                ),
            )

    def forget_copy(self, artifact: ArtifactSnapshot, copy: ArtifactCopy) -> None:
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM artifact_copies "
                "WHERE name = ? AND version = ? AND kind = ? AND place = ?",
                (artifact.name, artifact.version, copy.kind, copy.place),
            )

    def forget(self, artifact: ArtifactSnapshot) -> None:
        """Delete the artifact and the records of its copies."""
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM artifacts WHERE name = ? AND version = ?",
                (artifact.name, artifact.version),
            )

    def _find(self, which: str, args: tuple[Any, ...]) -> tuple[ArtifactSnapshot, ...]:
        rows = self._database.read(
            f"SELECT name, version, about, measured FROM artifacts {which}"
            "ORDER BY created_s DESC, name, version DESC",
            args,
        )
        return tuple(self._read(*row) for row in rows)

    def _read(self, name: str, version: int, about: str, measured: str | None) -> ArtifactSnapshot:
        rows = self._database.read(
            f"SELECT {_COPY_COLUMNS} FROM artifact_copies WHERE name = ? AND version = ? "
            "ORDER BY made_s",
            (name, version),
        )
        return replace(
            _snapshot_of(json.loads(about)),
            version=version,
            measured=None if measured is None else json.loads(measured),
            copies=tuple(_copy_of(row) for row in rows),
        )


def _snapshot_of(about: dict[str, Any]) -> ArtifactSnapshot:
    """Return a stored artifact, without its files if one has an unsafe name."""
    try:
        return from_wire(ArtifactSnapshot, about)
    except ForeignValueError:
        # A malicious node may have made an older version store a name that leads out of the
        # folder; without its files nothing is read or deleted there.
        return from_wire(ArtifactSnapshot, {**about, "files": []})


def content_sha256(files: Sequence[FileEntry]) -> str:
    """Return the identity of a set of files: the hash of their paths and hashes."""
    # Sorted and without dates, so that equal content always has the same identity.
    listed = sorted((entry.path, entry.sha256) for entry in files)
    return hashlib.sha256(json.dumps(listed).encode("ascii")).hexdigest()


def _copy_of(row: tuple[Any, ...]) -> ArtifactCopy:
    kind, place, path, made_s, checked_s, state, problem = row
    return ArtifactCopy(
        kind=cast(CopyKind, kind),
        place=place,
        path=path,
        made_s=made_s,
        checked_s=checked_s,
        state=cast(CopyState, state),
        problem=problem,
    )

"""Store of the nodes, in the order in which they were added.

A readable copy next to the database preserves the addresses if the database is lost, and with them
every run, since runs are found on their nodes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.paths import replace_text
from app.storage.database import Database


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    name: str
    address: dict[str, Any]
    """Plain form of the address, with the keys of `app.nodes.node`."""
    added_s: float
    identity: dict[str, Any] = field(default_factory=dict)
    """Plain form of the identity, with the keys of `app.nodes.node`; empty: not known."""


class NodeStore:
    def __init__(self, database: Database, copy: Path) -> None:
        self._database = database
        self._copy = copy

    def all(self) -> tuple[NodeRecord, ...]:
        rows = self._database.read(
            "SELECT name, address, added_s, identity FROM nodes ORDER BY rowid"
        )
        return tuple(
            NodeRecord(name=n, address=json.loads(a), added_s=t, identity=json.loads(i))
            for n, a, t, i in rows
        )

    def save(self, name: str, address: dict[str, Any], identity: dict[str, Any]) -> None:
        """Store a node, or its new address and identity."""
        node = NodeRecord(name=name, address=address, added_s=time.time(), identity=identity)
        self._insert(node)
        self._write_copy()

    def remove(self, name: str) -> None:
        with self._database.write() as connection:
            connection.execute("DELETE FROM nodes WHERE name = ?", (name,))
        self._write_copy()

    def _insert(self, node: NodeRecord) -> None:
        with self._database.write() as connection:
            # Not OR REPLACE, which gives the row a new rowid and so changes the order of nodes.
            connection.execute(
                "INSERT INTO nodes (name, address, added_s, identity) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET address = excluded.address, "
                "identity = excluded.identity",
                (node.name, json.dumps(node.address), node.added_s, json.dumps(node.identity)),
            )

    def _write_copy(self) -> None:
        nodes = [asdict(node) for node in self.all()]
        replace_text(self._copy, json.dumps(nodes, indent=1) + "\n")

    def restore_from_copy(self) -> None:
        """Restore the nodes from the readable copy after the loss of the database."""
        for node in _read_copy(self._copy):
            self._insert(node)


def _read_copy(path: Path) -> list[NodeRecord]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [
            NodeRecord(
                name=r["name"],
                address=dict(r["address"]),
                added_s=float(r["added_s"]),
                identity=dict(r.get("identity") or {}),
            )
            for r in rows
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []  # missing, or edited by hand: the user adds the nodes again

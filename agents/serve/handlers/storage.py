"""Handle requests about the disk of a node: what lies there, and deleting some of it."""

from __future__ import annotations

from typing import Any

from agents.contract.storage import StorageReport
from agents.contract.wire import from_wire
from agents.node import storage
from agents.serve.channel import Call


def list_all(call: Call) -> StorageReport:
    """List what lies below the agent's home."""
    return storage.list_storage(call.home)


def delete(call: Call) -> dict[str, Any]:
    """Delete some of that by name."""
    names = from_wire(tuple[str, ...], call.args.get("names"), "names")
    return {"freed_bytes": storage.delete_storage(call.home, names)}

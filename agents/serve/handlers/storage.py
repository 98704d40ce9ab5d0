"""Handlers of requests about the disk of a node: its contents, and deleting some of them."""

from __future__ import annotations

from agents.contract.requests.storage import DeleteStorage, Freed, ListStorage, StorageReport
from agents.node import storage
from agents.serve.channel import Call
from agents.serve.handlers import handles


@handles(ListStorage)
def list_all(call: Call, request: ListStorage) -> StorageReport:
    """List the contents of the agent's home."""
    return storage.list_storage(call.home)


@handles(DeleteStorage)
def delete(call: Call, request: DeleteStorage) -> Freed:
    """Delete some of those items by name."""
    return Freed(freed_bytes=storage.delete_storage(call.home, request.names))

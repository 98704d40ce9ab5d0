"""Handlers of requests about the disk of a node: its contents, and deleting some of them."""

from __future__ import annotations

from agents.contract.requests.storage import (
    DeleteStorage,
    FindMarks,
    FoundMarks,
    Freed,
    ListStorage,
    MarkHome,
    StorageReport,
)
from agents.node import home_marks, storage
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


@handles(MarkHome)
def mark_home(call: Call, request: MarkHome) -> None:
    """Write or remove a mark in the agent's home."""
    home_marks.mark_home(call.home, request.mark, removes=request.removes)


@handles(FindMarks)
def find_marks(call: Call, request: FindMarks) -> FoundMarks:
    """Return those of the marks that are in the agent's home."""
    return FoundMarks(marks=home_marks.find_marks(call.home, request.marks))

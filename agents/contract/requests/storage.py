"""Requests about the disk of a node: the contents of the agent's home, and deleting some of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.environments import KeptKind
from agents.contract.names import check_inside, check_name, check_number, check_text, check_time
from agents.contract.requests import DELETE_S, LOOK_S, NodeRequest

StorageKind = Literal[
    "model", "data", "artifact", "checkpoint", "run", "cache", "store", "partial", "other", KeptKind
]
"""Kind of stored item. `run`: logs and journals; `cache`: tokens, compiled kernels and streamed
layers; `store`: files without another name; `partial`: incomplete transfers; `other`: the agent
itself."""
MAX_ITEMS = 2000
"""Maximum number of items of a report, so that it fits into one message."""
_MAX_BYTES = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageItem:
    """Item that can only be deleted as a whole."""

    kind: StorageKind
    name: str
    """Path below the agent's home; for items of environments, their name."""
    size_bytes: int
    """Space on the disk, in bytes. A file with several names counts once, at its first item."""
    used_s: float
    """Time of the last use or change, in seconds since 1970 by the node's clock."""
    needed_by: str = ""
    """Reason to keep it on this node, such as `run r-1`; empty: it is not needed there."""

    def check_foreign(self) -> None:
        check_inside(self.name)
        check_number("size_bytes", self.size_bytes, 0, _MAX_BYTES)
        check_time("used_s", self.used_s)
        check_text("name", self.name)
        check_text("needed_by", self.needed_by)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageReport:
    """The largest items of a node, and the size of its disk."""

    items: tuple[StorageItem, ...]
    size_bytes: int
    """Size of all items, listed or not."""
    disk_bytes: int
    """Size of the file system with the agent's home."""
    disk_free_bytes: int

    def check_foreign(self) -> None:
        for name in ("size_bytes", "disk_bytes", "disk_free_bytes"):
            check_number(name, getattr(self, name), 0, _MAX_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListStorage(NodeRequest[StorageReport]):
    """List the contents of the agent's home, largest first."""

    kind = "storage.list"
    limit_s = LOOK_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Freed:
    freed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteStorage(NodeRequest[Freed]):
    """Delete some of those items by name."""

    kind = "storage.delete"
    limit_s = DELETE_S
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkHome(NodeRequest[None]):
    """Write a mark into the agent's home, or remove it.

    A node that finds the mark of another one has the same folder, as on a shared home.
    """

    kind = "storage.mark"
    mark: str
    """Random name."""
    removes: bool = False

    def check_foreign(self) -> None:
        check_name("mark", self.mark)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMarks:
    marks: tuple[str, ...]

    def check_foreign(self) -> None:
        for mark in self.marks:
            check_name("marks", mark)


@dataclass(frozen=True, kw_only=True, slots=True)
class FindMarks(NodeRequest[FoundMarks]):
    """Find which of these marks are in the agent's home."""

    kind = "storage.find_marks"
    marks: tuple[str, ...]

    def check_foreign(self) -> None:
        check_number("marks", len(self.marks), 0, MAX_ITEMS)
        for mark in self.marks:
            check_name("marks", mark)
